/**
 * The peer tier: blocks of other nodes' arenas and disks, fetched straight into our arena. Read-only; what it lists is what the
 * peers told, so that a lookup asks nobody.
 *
 *     lookup ──▶ PeerDirectory ◀── changes ── RemotePeer ◀──control── PeerServer of that node
 *     read ──choose by load──▶ RemotePeer ──streams──▶ native: receive into the slot, verify
 *
 * Invariants (law 1, 2): a block is 'ready' only after header and checksum were verified on arrival; a read ends within
 * `readLimitMs`, after trying another holder where there is one; when 'failed' is told, the connection is closed already.
 */
import { KvError } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Log } from '@kvtier/runtime';
import type { ArenaSlots } from '../disk/options.ts';
import { Followers, pagesOfRows } from '../kit/followers.ts';
import { Slices } from '../kit/slices.ts';
import type {
  Following,
  ReadStatus,
  RemoveReason,
  SlotBlock,
  Tier,
  TierChange,
  TierStats,
  WriteStatus,
} from '../kit/tier.ts';
import type { PeerSecurity } from './control.ts';
import { bitOf, bitsOf, maxPeers, PeerDirectory, PeerSet } from './directory.ts';
import { Dropping } from './dropping.ts';
import type { ChangeMessage } from './frames.ts';
import { maxHashes } from './frames.ts';
import type { FetchResult, PeerLoops } from './peer-loops.ts';
import { Reading, seenCorrupt, seenFailure } from './reading.ts';
import { type PeerAddress, RemotePeer } from './remote-peer.ts';

export interface PeerTierOptions {
  readonly loops: PeerLoops;
  readonly slots: Pick<ArenaSlots, 'slotBytesOf'>;
  readonly peers: readonly PeerAddress[];
  readonly security: PeerSecurity;
  /** Boot epoch of this node. */
  readonly epoch: bigint;
  readonly log: Log;
  /** Data connections to each peer. */
  readonly streams?: number;
  /** Bytes in flight on one of them. */
  readonly windowBytes?: number;
  /** Bytes asked for and not yet here, over all peers; reads beyond fail. */
  readonly maxPendingBytes?: number;
  readonly readLimitMs?: number;
  /** Blocks of others that may be listed. */
  readonly maxBlocks?: number;
  readonly maxRetryMs?: number;
  /** A peer that has never been connected may take so long before that is a warning. */
  readonly joinMs?: number;
}

const defaults = {
  streams: 4,
  windowBytes: 16 << 20,
  maxPendingBytes: 2 ** 31,
  readLimitMs: 5000,
  maxBlocks: 16 << 20,
  maxRetryMs: 5000,
  joinMs: 5000,
};

/** From a disk it costs that node a slot and a read: as if so much were ahead of it. */
const belowBytes = 64 << 20;

export class PeerTier implements Tier {
  readonly name = 'peer';
  readonly supports = { persistent: false, shared: true, writable: false, evicts: false };
  readonly #options: Required<PeerTierOptions>;
  readonly #directory: PeerDirectory;
  /** By their bits. Those of `#left` are closed, and keep their place until another one takes it. */
  readonly #peers: RemotePeer<Reading>[] = [];
  /** Whether what it held is gone, so that its bits are free. */
  readonly #left = new Map<number, 'going' | 'gone'>();
  #wanted: ReadonlyMap<string, PeerAddress> = new Map();
  readonly #followers = new Followers();
  readonly #counts = { hits: 0, misses: 0, evictions: 0, corrupt: 0, refused: 0 };
  readonly #detail = { fetched_blocks: 0, fetched_bytes: 0, failed_fetches: 0, second_tries: 0, unknown_messages: 0 };
  readonly #open = new Set<Promise<void>>();
  readonly #slices = new Slices();
  readonly #dropping: Dropping;
  /** Holders of the block that is looked at. */
  readonly #found = new PeerSet();
  #pendingBytes = 0;
  /** Somebody wanted is not joined before another one's bits are free. */
  #awaitsPlace = false;
  #closed = false;

  /** Connects in the background. KvError CONFIG when there are too many peers. */
  constructor(options: PeerTierOptions) {
    this.#options = { ...defaults, ...options };
    if (options.peers.length > maxPeers) {
      throw new KvError('CONFIG', `peers: ${options.peers.length} are more than ${maxPeers}; name fewer of them`);
    }
    this.#directory = new PeerDirectory(this.#options.maxBlocks);
    this.#dropping = new Dropping(this.#directory, this.#followers, this.#slices);
    for (const address of options.peers) this.#join(this.#peers.length, address);
    this.#wanted = byName(options.peers);
  }

  /**
   * Other peers from now on, `maxPeers` at most (the first ones), which are returned: who stays is not touched, who goes is let go of.
   */
  setPeers(addresses: readonly PeerAddress[]): readonly PeerAddress[] {
    this.#wanted = new Map([...byName(addresses)].slice(0, maxPeers));
    this.#arrange();
    return [...this.#wanted.values()];
  }

  /**
   * Whether blocks of the node with this boot epoch can come: it is a peer, or may be one whose connection was lost a moment ago, or that
   * waits for the place of one that goes. If not, those that are away for long are tried at once: one of them may have come back as this.
   */
  mayCome(epoch: bigint): boolean {
    const peers = this.#peers.filter((_, index) => !this.#left.has(index));
    const may = this.#awaitsPlace || peers.some((peer) => peer.mayBe(epoch));
    if (!may) for (const peer of peers) peer.dialSoon();
    return may;
  }

  lookup(namespace: Namespace, hashes: readonly HashKey[]): number {
    const held = this.#directory.lookup(namespace, hashes);
    this.#counts.hits += held;
    if (held < hashes.length) this.#counts.misses++;
    return held;
  }

  /** Tells the holders, in bounded messages: their copy of what is used here should stay. */
  touch(namespace: Namespace, hashes: readonly HashKey[]): void {
    const held = hashes.slice(0, maxHashes);
    const theirs = this.#peers.map((): HashKey[] => []);
    for (const hash of held) {
      const holders = this.#directory.holders(namespace, hash, this.#found);
      for (let index = 0; index < theirs.length; index++) if (holders.has(bitsOf(index))) theirs[index]!.push(hash);
    }
    for (const [index, hashes] of theirs.entries())
      if (hashes.length > 0) this.#peers[index]!.hint({ kind: 'hint', what: 'used', namespace, hashes });
  }

  /** Tells the holders of the block: whoever pinned it has it in its arena. */
  endPin(namespace: Namespace, ticket: Buffer, hash: HashKey): void {
    for (const index of this.#holdersOf(namespace, hash))
      this.#peers[index]!.hint({ kind: 'endPin', namespace, ticket });
  }

  async write(_namespace: Namespace, blocks: readonly SlotBlock[]): Promise<WriteStatus[]> {
    this.#counts.refused += blocks.length;
    return blocks.map(() => 'refused');
  }

  async read(
    namespace: Namespace,
    blocks: readonly SlotBlock[],
    onDone: (index: number, status: ReadStatus) => void,
  ): Promise<void> {
    if (blocks.length === 0) return;
    const { slots, readLimitMs } = this.#options;
    const deadlineMs = performance.now() + readLimitMs;
    const reading = new Reading(namespace, blocks, (slot) => slots.slotBytesOf(slot), deadlineMs, onDone);
    const { ended } = reading;
    this.#open.add(ended);
    this.#fetch(
      reading,
      blocks.map((_, index) => index),
    );
    await ended;
    this.#open.delete(ended);
  }

  remove(namespace: Namespace, hashes: readonly HashKey[], reason: RemoveReason): number {
    const held = hashes.filter((hash) => !this.#directory.holders(namespace, hash, this.#found).isEmpty);
    if (reason === 'corrupt') for (const hash of held) this.#tellCorrupt(namespace, hash);
    const gone = this.#directory.remove(namespace, held);
    this.#followers.removed(namespace, gone);
    if (reason === 'corrupt') this.#counts.corrupt += gone.length;
    if (reason === 'evicted') this.#counts.evictions += gone.length;
    return gone.length;
  }

  follow(listener: (change: TierChange) => void): () => void {
    return this.#followers.follow(listener, this.#directory.all());
  }

  followInPages(listener: (change: TierChange) => void): Following {
    return this.#followers.followInPages(listener, pagesOfRows(this.#directory));
  }

  stats(): TierStats {
    const peers = this.#peers.filter((_, index) => !this.#left.has(index));
    const away = peers.filter(({ connected }) => !connected);
    const inService = !this.#closed && (peers.length === 0 || away.length < peers.length);
    return {
      tier: this.name,
      blocks: this.#directory.count,
      bytes: 0,
      capacityBytes: 0,
      ...this.#counts,
      inService,
      outOfServiceReason: inService ? '' : away.map(({ name, reason }) => `${name}: ${reason}`).join('; '),
      detail: {
        ...this.#detail,
        connected_peers: peers.length - away.length,
        listed_peers: peers.filter(({ listed }) => listed).length,
        /** Connected, and with a stream that is up. */
        usable_peers: peers.filter(({ usable }) => usable).length,
        configured_peers: peers.length,
        left_out_blocks: this.#directory.leftOut,
        pending_bytes: this.#pendingBytes,
      },
    };
  }

  checkIntegrity(): void {
    this.#directory.checkIntegrity();
  }

  /** Ends the connections to the peers; the loops is its owner's to close. Reads in flight fail. */
  async close(): Promise<void> {
    this.#closed = true;
    for (const peer of this.#peers) peer.close();
    this.#slices.clear();
    await Promise.all(this.#open);
  }

  #arrange(): void {
    if (this.#closed) return;
    const here = new Set<string>();
    for (const [index, peer] of this.#peers.entries()) {
      if (this.#left.has(index)) continue;
      if (this.#wanted.has(peer.name)) here.add(peer.name);
      else this.#leave(index);
    }
    this.#awaitsPlace = false;
    for (const [name, address] of this.#wanted) {
      if (here.has(name)) continue;
      const free = [...this.#left].find(([, state]) => state === 'gone')?.[0];
      const index = free ?? this.#peers.length;
      // The bits of one that goes are free soon, and then this is asked again.
      if (index < maxPeers) this.#join(index, address);
      else this.#awaitsPlace = true;
    }
  }

  #join(index: number, address: PeerAddress): void {
    this.#left.delete(index);
    // One that was closed may end after another one has its bits: what it says is nobody's.
    const isIt = (): boolean => this.#peers[index] === peer;
    const peer: RemotePeer<Reading> = new RemotePeer<Reading>({
      ...this.#options,
      address,
      slices: this.#slices,
      onFetched: (reading, block, result) => this.#fetched(reading, block, index, result),
      onChange: (change) => (isIt() ? this.#changed(index, change) : undefined),
      onUnknown: () => this.#detail.unknown_messages++,
      onGone: () => (isIt() ? this.#dropping.dropped(bitsOf(index)) : Promise.resolve()),
    });
    this.#peers[index] = peer;
  }

  #leave(index: number): void {
    this.#left.set(index, 'going');
    this.#peers[index]!.close();
    void this.#dropping.dropped(bitsOf(index)).then(() => {
      this.#left.set(index, 'gone');
      this.#arrange();
    });
  }

  /** Send each to the holder with the least to do that has not been tried; end those that have none. */
  #fetch(reading: Reading, indexes: readonly number[]): void {
    const loads = this.#peers.map(({ loadBytes }) => loadBytes);
    const usable = this.#peers.map((peer) => peer.usable);
    const chosen = this.#peers.map((): number[] => []);
    const nowMs = performance.now();
    const ended: number[] = [];
    for (const index of indexes) {
      const bytes = reading.slotBytes[index]!;
      const [peer, isLast] = this.#closed ? [-1, true] : this.#choose(reading, index, usable, loads);
      const isFull = this.#pendingBytes + bytes > this.#options.maxPendingBytes;
      if (isFull) reading.seen[index]! |= seenFailure;
      if (peer === -1 || isFull) {
        ended.push(index);
        continue;
      }
      this.#pendingBytes += bytes;
      loads[peer]! += bytes;
      // Half of what is left while another holder could still be tried.
      reading.deadlinesMs[index] = isLast ? reading.deadlineMs : nowMs + Math.max(1, (reading.deadlineMs - nowMs) / 2);
      chosen[peer]!.push(index);
    }
    for (const [peer, theirs] of chosen.entries()) if (theirs.length > 0) this.#peers[peer]!.fetch(reading, theirs);
    for (const index of ended) this.#end(reading, index);
  }

  /** Of the holders that were not tried, and whether no other one is left; -1: none of them can be asked. */
  #choose(reading: Reading, index: number, usable: readonly boolean[], loads: readonly number[]): [number, boolean] {
    let best = -1;
    let bestCost = Number.POSITIVE_INFINITY;
    let left = 0;
    const holders = this.#directory.holders(reading.namespace, reading.blocks[index]!.hash, this.#found);
    const tried = reading.triedAt(index);
    for (let peer = 0; peer < loads.length; peer++) {
      if (!holders.has(bitsOf(peer)) || tried.has(bitsOf(peer))) continue;
      left++;
      if (!usable[peer]) {
        reading.seen[index]! |= seenFailure;
        continue;
      }
      const cost = loads[peer]! + (holders.has(bitOf(peer, 0)) ? 0 : belowBytes);
      if (cost < bestCost) [best, bestCost] = [peer, cost];
    }
    return [best, left === 1];
  }

  /** A holder that was not tried. */
  #hasOther(reading: Reading, index: number): boolean {
    const holders = this.#directory.holders(reading.namespace, reading.blocks[index]!.hash, this.#found);
    const tried = reading.triedAt(index);
    return this.#peers.some((_, peer) => holders.has(bitsOf(peer)) && !tried.has(bitsOf(peer)));
  }

  #fetched(reading: Reading, index: number, peer: number, result: FetchResult): void {
    const bytes = reading.slotBytes[index]!;
    this.#pendingBytes -= bytes;
    if (result === 'ready') {
      this.#detail.fetched_blocks++;
      this.#detail.fetched_bytes += bytes;
      reading.end(index, 'ready');
      return;
    }
    const { namespace } = reading;
    const { hash } = reading.blocks[index]!;
    reading.wasTried(index, bitsOf(peer));
    if (result === 'failed') {
      reading.seen[index]! |= seenFailure;
      this.#detail.failed_fetches++;
    } else {
      if (result === 'corrupt') {
        reading.seen[index]! |= seenCorrupt;
        this.#counts.corrupt++;
        this.#tellCorrupt(namespace, hash, peer);
      }
      this.#followers.removed(namespace, this.#directory.remove(namespace, [hash], bitsOf(peer)));
    }
    if (this.#hasOther(reading, index) && performance.now() < reading.deadlineMs) this.#detail.second_tries++;
    this.#fetch(reading, [index]);
  }

  #end(reading: Reading, index: number): void {
    const seen = reading.seen[index]!;
    const status = (seen & seenCorrupt) !== 0 ? 'corrupt' : (seen & seenFailure) !== 0 ? 'failed' : 'missing';
    reading.end(index, status);
  }

  /** All that hold it, or the one. */
  #tellCorrupt(namespace: Namespace, hash: HashKey, only?: number): void {
    for (const index of this.#holdersOf(namespace, hash)) {
      if (only !== undefined && index !== only) continue;
      this.#peers[index]!.hint({ kind: 'hint', what: 'corrupt', namespace, hashes: [hash] });
    }
  }

  /** A list, as what is said to one of them may end its connection, and what it was asked for is sought elsewhere meanwhile. */
  #holdersOf(namespace: Namespace, hash: HashKey): number[] {
    const holders = this.#directory.holders(namespace, hash, this.#found);
    return [...this.#peers.keys()].filter((index) => holders.has(bitsOf(index)));
  }

  #changed(peer: number, { tier, change, namespace, hashes }: ChangeMessage): Promise<void> | undefined {
    const bits = bitOf(peer, tier);
    if (change === 'cleared' || namespace === null) return this.#dropping.dropped(bits);
    if (change === 'stored') {
      this.#dropping.held(bits);
      this.#followers.stored(namespace, this.#directory.add(namespace, hashes, bits));
    } else this.#followers.removed(namespace, this.#directory.remove(namespace, hashes, bits));
    return undefined;
  }
}

const byName = (addresses: readonly PeerAddress[]): ReadonlyMap<string, PeerAddress> =>
  new Map(addresses.map((address) => [`${address.host}:${address.port}`, address]));
