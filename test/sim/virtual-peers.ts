/**
 * Other nodes' arenas over a network with latency, resets and partitions. The announcer, which tells what a node holds, and the
 * directory of who holds what, and how a peer's blocks are dropped from it, are the real ones, a page being a few blocks and a full socket some dozens; the connections are
 * modelled here: the native data plane and its sockets have tests of their own (packages/store/tiers/src/peer).
 *
 *     node's arena ──Announcer──▶ pages, changes ──in order──▶ PeerDirectory of each other node        read ──▶ holder pins, sends ──▶ verified ──▶ slot
 */
import type { HashKey, Namespace } from '@kvtier/identity';
import type { ReadStatus, SlotBlock, Tier, TierChange, TierStats, WriteStatus } from '@kvtier/tiers';
import { type ArenaTier, Followers, Slices } from '@kvtier/tiers';
import { identitiesOf } from '@kvtier/tiers/disk/testing';
import type { ChangeMessage, Message } from '@kvtier/tiers/peer/testing';
import { Announcer, bitOf, bitsOf, Dropping, maxPeers, PeerDirectory, type Told } from '@kvtier/tiers/peer/testing';
import { isSound } from './virtual-arena.ts';
import { type Life, Violation, type World } from './world.ts';

/** What a node shows to its peers. */
export interface PeerHost {
  readonly number: number;
  readonly life: Life;
  readonly arena: ArenaTier;
  readonly memory: Buffer;
}

const readLimitUs = 400_000;
const retryUs = 200_000;

export class PeerNetwork {
  readonly world: World;
  readonly hosts = new Map<number, PeerHost>();
  readonly links = new Set<Link>();
  readonly #slices = new WeakMap<PeerHost, Slices>();
  /** Pairs that cannot reach each other: "0-2". */
  readonly cut = new Set<string>();
  flips = 0;
  /** Probability that one block hangs, while those beside it come. */
  stuck = 0;
  counts = { fetches: 0, resets: 0, stuck: 0 };

  constructor(world: World) {
    this.world = world;
  }

  reaches(a: number, b: number): boolean {
    return !this.cut.has(`${Math.min(a, b)}-${Math.max(a, b)}`);
  }

  /** Connections to and from this node, or all of them, end. */
  reset(number?: number): void {
    this.counts.resets++;
    for (const link of [...this.links]) if (number === undefined || link.touches(number)) link.end();
  }

  /** One for all that a host tells, as `PeerServer` has it. */
  slicesOf(host: PeerHost): Slices {
    const slices = this.#slices.get(host) ?? new Slices();
    this.#slices.set(host, slices);
    return slices;
  }

  delayUs(): number {
    return this.world.between(30, 500) + (this.world.chance(0.04) ? this.world.between(5_000, 100_000) : 0);
  }
}

/** What a node says to another one: in order, late, and no more at a time than fits. */
class VirtualControl implements Told {
  readonly #link: Link;
  readonly #network: PeerNetwork;
  readonly #host: PeerHost;
  readonly #tier: ModelPeerTier;
  #onDrain: () => void = () => {};
  #lastUs = 0;
  #onWay = 0;
  readonly socket = {
    on: (_: 'drain', listener: () => void) => {
      this.#onDrain = listener;
    },
    off: () => {
      this.#onDrain = () => {};
    },
  };

  constructor(link: Link, network: PeerNetwork, host: PeerHost, tier: ModelPeerTier) {
    this.#link = link;
    this.#network = network;
    this.#host = host;
    this.#tier = tier;
  }

  get ended(): boolean {
    return !this.#link.isOpen;
  }

  /** A message is as much as a quarter of what may be unsent. */
  get unsentBytes(): number {
    return this.#onWay << 18;
  }

  send(message: Message): void {
    const { world } = this.#network;
    this.#lastUs = Math.max(this.#lastUs, world.nowUs + this.#network.delayUs());
    this.#onWay++;
    const arrive = (): void => this.#link.heard(message);
    const taken = (): void => {
      if (--this.#onWay === 0) this.#onDrain();
    };
    world.schedule(this.#lastUs - world.nowUs, 'peer change', arrive, this.#tier.life);
    world.schedule(this.#lastUs - world.nowUs, 'peer change is taken', taken, this.#host.life);
  }
}

/** The connection of one node to one other: its changes arrive in order, its fetches end, or it ends. */
class Link {
  readonly #network: PeerNetwork;
  readonly #tier: ModelPeerTier;
  readonly #host: PeerHost;
  readonly #announcer: Announcer;
  readonly #fetches = new Set<() => void>();
  readonly #held: ChangeMessage[] = [];
  #isHeld = false;
  #sequence = 0;
  isOpen = true;
  isListed = false;

  constructor(network: PeerNetwork, tier: ModelPeerTier, host: PeerHost) {
    this.#network = network;
    this.#tier = tier;
    this.#host = host;
    network.links.add(this);
    const { world } = network;
    const before = world.life;
    world.life = host.life;
    const control = new VirtualControl(this, network, host, tier);
    this.#announcer = new Announcer(control, network.slicesOf(host), host.arena, undefined);
    world.life = before;
  }

  heard(message: Message): void {
    if (!this.isOpen) return;
    if (message.kind === 'listed') this.isListed = true;
    if (message.kind !== 'change') return;
    if (message.sequence !== ++this.#sequence) throw new Violation('law 6: a peer tells out of order');
    if (this.#isHeld) this.#held.push(message);
    else this.#apply(message);
  }

  /** What follows waits while what was cleared goes. */
  #apply(message: ChangeMessage): void {
    const busy = this.#tier.changed(this.#host.number, message);
    if (busy === undefined) return;
    this.#isHeld = true;
    void busy.then(() => {
      this.#isHeld = false;
      while (this.isOpen && !this.#isHeld && this.#held.length > 0) this.#apply(this.#held.shift()!);
    });
  }

  /** Nothing is on its way: the directory says of this host what its arena holds. */
  get isQuiet(): boolean {
    return this.isListed && !this.#isHeld;
  }

  touches(number: number): boolean {
    return this.#host.number === number || this.#tier.number === number;
  }

  /** Both ends find out after a while; here at once. */
  end(): void {
    if (!this.isOpen) return;
    this.isOpen = false;
    this.#announcer.end();
    this.#network.links.delete(this);
    const { world } = this.#network;
    world.schedule(0, 'peer connection ends', () => this.#tier.lost(this, this.#host.number), this.#tier.life);
    for (const fail of [...this.#fetches]) fail();
    this.#fetches.clear();
  }

  fetch(
    namespace: Namespace,
    { hash, slot }: SlotBlock,
    memory: Buffer,
    bytes: number,
    end: (status: ReadStatus) => void,
  ) {
    const { world } = this.#network;
    const host = this.#host;
    const identity = identitiesOf(namespace, [hash]);
    const view = memory.subarray(slot, slot + bytes);
    const { life } = this.#tier;
    let isOver = false;
    const finish = (status: ReadStatus): void => {
      if (isOver) return;
      isOver = true;
      world.cancel(limit);
      this.#fetches.delete(fail);
      end(status);
    };
    // Told in a turn of its own, as a connection's end is.
    const fail = (): void => void world.schedule(0, 'peer fetch fails', () => finish('failed'), life);
    this.#fetches.add(fail);
    const limit = world.schedule(
      readLimitUs,
      'peer fetch limit',
      () => {
        this.end();
        finish('failed');
      },
      life,
    );
    const answer = (): void => {
      const block = host.arena.get(namespace, hash);
      if (block === undefined) {
        world.schedule(this.#network.delayUs(), 'peer misses', () => finish('missing'), life);
        return;
      }
      host.arena.pin(namespace, hash);
      const isStuck = this.#network.stuck > 0 && world.chance(this.#network.stuck);
      if (isStuck) this.#network.counts.stuck++;
      // Sent while it is pinned, out of the slot.
      world.schedule(
        isStuck ? world.between(50, 1_000) * 1000 : this.#network.delayUs(),
        'peer sends',
        () => {
          const sent = Buffer.from(host.memory.subarray(block.slot, block.slot + bytes));
          host.arena.unpin(namespace, hash);
          const arrive = (): void => {
            if (isOver) return;
            sent.copy(view);
            if (this.#network.flips > 0 && world.chance(this.#network.flips)) view[world.between(0, bytes - 1)]! ^= 8;
            finish(isSound(view, identity, true) ? 'ready' : 'corrupt');
          };
          world.schedule(this.#network.delayUs(), 'peer delivers', arrive, life);
        },
        host.life,
      );
    };
    world.schedule(this.#network.delayUs(), 'peer asks', answer, host.life);
    this.#network.counts.fetches++;
  }
}

const everyPeer = Array.from({ length: maxPeers }, (_, peer) => peer);

export class ModelPeerTier implements Tier {
  readonly name = 'peer';
  readonly supports = { persistent: false, shared: true, writable: false, evicts: false };
  readonly number: number;
  readonly life: Life;
  readonly #network: PeerNetwork;
  readonly #arena: ArenaTier;
  readonly #memory: Buffer;
  readonly #directory = new PeerDirectory(10_000);
  readonly #followers = new Followers();
  readonly #links = new Map<number, Link>();
  readonly #slices = new Slices();
  /** Peers whose entries still go. */
  readonly #going = new Set<number>();
  readonly #dropping = new Dropping(this.#directory, this.#followers, this.#slices);
  /** Holders whose block was removed here; they may hold it still. */
  readonly #forgotten = new Map<string, ReadonlySet<number>>();
  #closed = false;

  constructor(network: PeerNetwork, number: number, arena: ArenaTier, memory: Buffer) {
    this.#network = network;
    this.number = number;
    this.life = network.world.life;
    this.#arena = arena;
    this.#memory = memory;
    this.#look();
  }

  /** Connect to whom there is. */
  #look(): void {
    if (this.#closed) return;
    for (const host of this.#network.hosts.values()) {
      const may =
        host.number !== this.number && !this.#going.has(host.number) && this.#network.reaches(host.number, this.number);
      if (may && host.life.alive && !this.#links.has(host.number)) {
        this.#links.set(host.number, new Link(this.#network, this, host));
      }
    }
    this.#network.world.schedule(retryUs, 'peers are looked for', () => this.#look(), this.life);
  }

  /** As `PeerTier` does it. */
  changed(peer: number, { change, namespace, hashes }: ChangeMessage): Promise<void> | undefined {
    const bits = bitOf(peer, 0);
    if (change === 'cleared' || namespace === null) return this.#dropping.dropped(bits);
    if (change === 'stored') {
      this.#dropping.held(bits);
      this.#followers.stored(namespace, this.#directory.add(namespace, hashes, bits));
      for (const hash of hashes) {
        const others = [...this.#forgottenOf(namespace.key + hash)].filter((each) => each !== peer);
        this.#forget(namespace, hash, others);
      }
    } else this.#followers.removed(namespace, this.#directory.remove(namespace, hashes, bits));
    return undefined;
  }

  lost(link: Link, peer: number): void {
    if (this.#links.get(peer) !== link) return;
    this.#links.delete(peer);
    this.#going.add(peer);
    void this.#dropping.dropped(bitsOf(peer)).then(() => this.#going.delete(peer));
  }

  /** Law 6, when nothing changes any more: what is listed of each peer is what it holds, but for what was removed here. "": it is. */
  disagreement(): string {
    const held = new Map<string, Set<number>>();
    for (const host of this.#network.hosts.values()) {
      if (host.number === this.number || !host.life.alive) continue;
      const link = this.#links.get(host.number);
      if (link === undefined || !link.isQuiet) return `peer ${host.number} is not listed`;
      host.arena.follow(({ namespace, hashes }) => {
        for (const hash of hashes) {
          const name = namespace!.key + hash;
          held.set(name, (held.get(name) ?? new Set()).add(host.number));
        }
      })();
    }
    for (const [namespace, hashes] of this.#directory.all()) {
      for (const hash of hashes) {
        const name = namespace.key + hash;
        const those = held.get(name) ?? new Set();
        for (let peer = 0; peer < maxPeers; peer++) {
          const isListed = this.#directory.holds(namespace, hash, bitsOf(peer));
          if (isListed && !those.has(peer)) return 'a block is listed that its peer does not hold';
          const isMissing = !isListed && those.has(peer) && !this.#forgottenOf(name).has(peer);
          if (isMissing) return 'a holder of a block is not listed';
        }
        held.delete(name);
      }
    }
    for (const [name, holders] of held)
      if ([...holders].some((peer) => !this.#forgottenOf(name).has(peer))) return 'a block of a peer is not listed';
    return '';
  }

  lookup(namespace: Namespace, hashes: readonly HashKey[]): number {
    return this.#directory.lookup(namespace, hashes);
  }

  touch(): void {}

  async write(_namespace: Namespace, blocks: readonly SlotBlock[]): Promise<WriteStatus[]> {
    return blocks.map(() => 'refused');
  }

  async read(
    namespace: Namespace,
    blocks: readonly SlotBlock[],
    onDone: (index: number, status: ReadStatus) => void,
  ): Promise<void> {
    await Promise.all(
      blocks.map(
        (block, index) =>
          new Promise<void>((resolve) => {
            const holders = this.#directory.holders(namespace, block.hash);
            const peer = [...this.#links.keys()].find((number) => holders.has(bitOf(number, 0)));
            const end = (status: ReadStatus): void => {
              if (status !== 'ready' && status !== 'failed' && peer !== undefined) {
                this.#forget(namespace, block.hash, [...this.#forgottenOf(namespace.key + block.hash), peer]);
                this.#followers.removed(namespace, this.#directory.remove(namespace, [block.hash], bitsOf(peer)));
              }
              onDone(index, status);
              resolve();
            };
            const bytes = this.#arena.slotBytesOf(block.slot);
            if (peer === undefined) end('missing');
            else this.#links.get(peer)!.fetch(namespace, block, this.#memory, bytes, end);
          }),
      ),
    );
  }

  remove(namespace: Namespace, hashes: readonly HashKey[]): number {
    const gone = this.#directory.remove(namespace, hashes);
    for (const hash of hashes) this.#forget(namespace, hash, everyPeer);
    this.#followers.removed(namespace, gone);
    return gone.length;
  }

  follow(listener: (change: TierChange) => void): () => void {
    return this.#followers.follow(listener, this.#directory.all());
  }

  stats(): TierStats {
    const blocks = this.#directory.count;
    return {
      ...{ tier: this.name, blocks, bytes: 0, capacityBytes: 0, hits: 0, misses: 0, evictions: 0, corrupt: 0 },
      ...{ refused: 0, inService: true, outOfServiceReason: '' },
    };
  }

  checkIntegrity(): void {
    this.#directory.checkIntegrity();
  }

  #forgottenOf(name: string): ReadonlySet<number> {
    return this.#forgotten.get(name) ?? new Set();
  }

  #forget({ key }: Namespace, hash: HashKey, holders: readonly number[]): void {
    if (holders.length === 0) this.#forgotten.delete(key + hash);
    else this.#forgotten.set(key + hash, new Set(holders));
  }

  async close(): Promise<void> {
    this.#closed = true;
    this.#slices.clear();
    for (const link of [...this.#links.values()]) link.end();
  }
}
