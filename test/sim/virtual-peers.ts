/**
 * Other nodes' arenas over a network with latency, resets and partitions. The directory of who holds what is the real one; the
 * connections are modelled here: the native data plane and its sockets have tests of their own (packages/tiers/src/peer).
 *
 *     node's arena ──changes, in order──▶ PeerDirectory of each other node        read ──▶ holder pins, sends ──▶ verified ──▶ slot
 */
import type { HashKey, Namespace } from '../../packages/identity/src/index.ts';
import { identitiesOf } from '../../packages/tiers/src/disk/disk-io.ts';
import type {
  ReadStatus,
  SlotBlock,
  Tier,
  TierChange,
  TierStats,
  WriteStatus,
} from '../../packages/tiers/src/index.ts';
import { type ArenaTier, Followers } from '../../packages/tiers/src/index.ts';
import { bitOf, bitsOf, PeerDirectory } from '../../packages/tiers/src/peer/directory.ts';
import { isSound } from './virtual-arena.ts';
import type { Life, World } from './world.ts';

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
  /** Pairs that cannot reach each other: "0-2". */
  readonly cut = new Set<string>();
  flips = 0;
  counts = { fetches: 0, resets: 0 };

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

  delayUs(): number {
    return this.world.between(30, 500) + (this.world.chance(0.04) ? this.world.between(5_000, 100_000) : 0);
  }
}

/** The connection of one node to one other: its changes arrive in order, its fetches end, or it ends. */
class Link {
  readonly #network: PeerNetwork;
  readonly #tier: ModelPeerTier;
  readonly #host: PeerHost;
  readonly #unfollow: () => void;
  readonly #fetches = new Set<() => void>();
  #lastUs = 0;
  #isOpen = true;

  constructor(network: PeerNetwork, tier: ModelPeerTier, host: PeerHost) {
    this.#network = network;
    this.#tier = tier;
    this.#host = host;
    network.links.add(this);
    this.#unfollow = host.arena.follow((change) => {
      const { world } = network;
      this.#lastUs = Math.max(this.#lastUs, world.nowUs + network.delayUs());
      const tell = (): void => {
        if (this.#isOpen) tier.changed(host.number, change);
      };
      world.schedule(this.#lastUs - world.nowUs, 'peer change', tell, tier.life);
    });
  }

  touches(number: number): boolean {
    return this.#host.number === number || this.#tier.number === number;
  }

  /** Both ends find out after a while; here at once. */
  end(): void {
    if (!this.#isOpen) return;
    this.#isOpen = false;
    this.#unfollow();
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
      // Sent while it is pinned, out of the slot.
      world.schedule(
        this.#network.delayUs(),
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
      const may = host.number !== this.number && this.#network.reaches(host.number, this.number);
      if (may && host.life.alive && !this.#links.has(host.number)) {
        this.#links.set(host.number, new Link(this.#network, this, host));
      }
    }
    this.#network.world.schedule(retryUs, 'peers are looked for', () => this.#look(), this.life);
  }

  changed(peer: number, change: TierChange): void {
    const bits = bitOf(peer, 0);
    if (change.kind === 'stored')
      this.#followers.stored(change.namespace, this.#directory.add(change.namespace, change.hashes, bits));
    else if (change.kind === 'removed')
      this.#followers.removed(change.namespace, this.#directory.remove(change.namespace, change.hashes, bits));
  }

  lost(link: Link, peer: number): void {
    if (this.#links.get(peer) !== link) return;
    this.#links.delete(peer);
    const next = this.#directory.drop(bitsOf(peer));
    for (let gone = next(); gone !== undefined; gone = next())
      for (const [namespace, hashes] of gone) this.#followers.removed(namespace, hashes);
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
            const bits = this.#directory.holders(namespace, block.hash);
            const peer = [...this.#links.keys()].find((number) => (bits & bitOf(number, 0)) !== 0);
            const end = (status: ReadStatus): void => {
              if (status !== 'ready' && status !== 'failed' && peer !== undefined) {
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
    const gone = this.#directory.remove(namespace, hashes, -1);
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

  async close(): Promise<void> {
    this.#closed = true;
    for (const link of [...this.#links.values()]) link.end();
  }
}
