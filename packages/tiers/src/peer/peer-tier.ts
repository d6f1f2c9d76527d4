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
import { identitiesOf } from '../disk/disk-io.ts';
import type { ArenaSlots, DiskLog } from '../disk/options.ts';
import { Followers } from '../followers.ts';
import type { ReadStatus, SlotBlock, Tier, TierChange, TierStats, WriteStatus } from '../tier.ts';
import type { PeerSecurity } from './control.ts';
import { bitOf, bitsOf, maxPeers, PeerDirectory } from './directory.ts';
import type { PeerEngine } from './engine.ts';
import type { ChangeMessage } from './frames.ts';
import { maxHashes } from './frames.ts';
import { type FetchJob, type PeerAddress, RemotePeer } from './remote-peer.ts';

export interface PeerTierOptions {
  readonly engine: PeerEngine;
  readonly slots: Pick<ArenaSlots, 'slotBytesOf'>;
  readonly peers: readonly PeerAddress[];
  readonly security: PeerSecurity;
  /** Boot epoch of this node. */
  readonly epoch: bigint;
  readonly log: DiskLog;
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
}

const defaults = {
  streams: 4,
  windowBytes: 16 << 20,
  maxPendingBytes: 2 ** 31,
  readLimitMs: 5000,
  maxBlocks: 4 << 20,
  maxRetryMs: 5000,
};

interface Waiting {
  readonly namespace: Namespace;
  readonly hash: HashKey;
  readonly slot: number;
  readonly identity: Buffer;
  readonly deadlineMs: number;
  /** Bits of peers that did not deliver. */
  tried: number;
  sawCorrupt: boolean;
  sawFailure: boolean;
  readonly onDone: (status: ReadStatus) => void;
}

export class PeerTier implements Tier {
  readonly name = 'peer';
  readonly supports = { persistent: false, shared: true, writable: false, evicts: false };
  readonly #options: Required<PeerTierOptions>;
  readonly #directory: PeerDirectory;
  readonly #peers: readonly RemotePeer[];
  readonly #followers = new Followers();
  readonly #counts = { hits: 0, misses: 0, evictions: 0, corrupt: 0, refused: 0 };
  readonly #detail = { fetched_blocks: 0, fetched_bytes: 0, failed_fetches: 0, second_tries: 0 };
  readonly #open = new Set<Promise<void>>();
  #pendingBytes = 0;
  #closed = false;

  /** Connects in the background. KvError CONFIG when there are too many peers. */
  constructor(options: PeerTierOptions) {
    this.#options = { ...defaults, ...options };
    if (options.peers.length > maxPeers) {
      throw new KvError('CONFIG', `peers: ${options.peers.length} are more than ${maxPeers}; name fewer of them`);
    }
    this.#directory = new PeerDirectory(this.#options.maxBlocks);
    this.#peers = options.peers.map(
      (address, index) =>
        new RemotePeer({
          ...this.#options,
          address,
          onChange: (change) => this.#changed(index, change),
          onGone: () => this.#dropped(bitsOf(index)),
        }),
    );
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
    for (const [index, peer] of this.#peers.entries()) {
      const theirs = held.filter((hash) => (this.#directory.holders(namespace, hash) & bitsOf(index)) !== 0);
      if (theirs.length > 0) peer.hint({ kind: 'hint', what: 'used', namespace, hashes: theirs });
    }
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
    const identities = identitiesOf(
      namespace,
      blocks.map(({ hash }) => hash),
    );
    const deadlineMs = performance.now() + this.#options.readLimitMs;
    const ended = new Promise<void>((resolve) => {
      let open = blocks.length;
      const waiting = blocks.map(
        ({ hash, slot }, index): Waiting => ({
          ...{ namespace, hash, slot, deadlineMs, tried: 0, sawCorrupt: false, sawFailure: false },
          identity: identities.subarray(index * 64, index * 64 + 64),
          onDone: (status) => {
            onDone(index, status);
            if (--open === 0) resolve();
          },
        }),
      );
      this.#fetch(waiting);
    });
    this.#open.add(ended);
    await ended;
    this.#open.delete(ended);
  }

  remove(namespace: Namespace, hashes: readonly HashKey[], reason: 'corrupt' | 'evicted' | 'asked'): number {
    const held = hashes.filter((hash) => this.#directory.holders(namespace, hash) !== 0);
    if (reason === 'corrupt') for (const hash of held) this.#tellCorrupt(namespace, hash, -1);
    const gone = this.#directory.remove(namespace, held, -1);
    this.#followers.removed(namespace, gone);
    if (reason === 'corrupt') this.#counts.corrupt += gone.length;
    if (reason === 'evicted') this.#counts.evictions += gone.length;
    return gone.length;
  }

  follow(listener: (change: TierChange) => void): () => void {
    return this.#followers.follow(listener, this.#directory.all());
  }

  stats(): TierStats {
    const away = this.#peers.filter(({ connected }) => !connected);
    const inService = !this.#closed && (this.#peers.length === 0 || away.length < this.#peers.length);
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
        connected_peers: this.#peers.length - away.length,
        listed_peers: this.#peers.filter(({ listed }) => listed).length,
        /** Connected, and with a stream that is up. */
        usable_peers: this.#peers.filter(({ usable }) => usable).length,
        configured_peers: this.#peers.length,
        left_out_blocks: this.#directory.leftOut,
        pending_bytes: this.#pendingBytes,
      },
    };
  }

  checkIntegrity(): void {
    this.#directory.checkIntegrity();
  }

  /** Ends the connections to the peers; the engine is its owner's to close. Reads in flight fail. */
  async close(): Promise<void> {
    this.#closed = true;
    for (const peer of this.#peers) peer.close();
    await Promise.all(this.#open);
  }

  /** Send each to the holder with the least to do that has not been tried; end those that have none. */
  #fetch(waiting: readonly Waiting[]): void {
    const batches = new Map<RemotePeer, FetchJob[]>();
    const addedBytes = new Map<RemotePeer, number>();
    for (const one of waiting) {
      const slotBytes = this.#options.slots.slotBytesOf(one.slot);
      const loadOf = (peer: RemotePeer): number => peer.loadBytes + (addedBytes.get(peer) ?? 0);
      const index = this.#choose(one, loadOf);
      const full = this.#pendingBytes + slotBytes > this.#options.maxPendingBytes;
      if (index === undefined || full) {
        this.#end(one, full);
        continue;
      }
      const peer = this.#peers[index]!;
      this.#pendingBytes += slotBytes;
      addedBytes.set(peer, (addedBytes.get(peer) ?? 0) + slotBytes);
      const batch = batches.get(peer) ?? [];
      batches.set(peer, batch);
      batch.push({
        slot: one.slot,
        slotBytes,
        identity: one.identity,
        deadlineMs: this.#attemptDeadline(one, index),
        onDone: (result) => {
          this.#pendingBytes -= slotBytes;
          this.#fetched(one, index, slotBytes, result);
        },
      });
    }
    for (const [peer, jobs] of batches) peer.fetch(jobs);
  }

  #choose(one: Waiting, loadOf: (peer: RemotePeer) => number): number | undefined {
    const holders = this.#directory.holders(one.namespace, one.hash) & ~one.tried;
    if (holders === 0 || this.#closed) return undefined;
    let best: number | undefined;
    let bestCost = Number.POSITIVE_INFINITY;
    for (const [index, peer] of this.#peers.entries()) {
      if ((holders & bitsOf(index)) === 0) continue;
      if (!peer.usable) {
        one.sawFailure = true;
        continue;
      }
      // From a disk it costs that node a slot and a read: as if 64 MiB were ahead of it.
      const cost = loadOf(peer) + ((holders & bitOf(index, 0)) === 0 ? 64 << 20 : 0);
      if (cost < bestCost) [best, bestCost] = [index, cost];
    }
    return best;
  }

  /** Half of what is left while another holder could still be tried. */
  #attemptDeadline(one: Waiting, index: number): number {
    const others = this.#directory.holders(one.namespace, one.hash) & ~one.tried & ~bitsOf(index);
    const nowMs = performance.now();
    return others === 0 ? one.deadlineMs : nowMs + Math.max(1, (one.deadlineMs - nowMs) / 2);
  }

  #fetched(one: Waiting, index: number, slotBytes: number, result: 'ready' | 'missing' | 'failed' | 'corrupt'): void {
    if (result === 'ready') {
      this.#detail.fetched_blocks++;
      this.#detail.fetched_bytes += slotBytes;
      one.onDone('ready');
      return;
    }
    one.tried |= bitsOf(index);
    if (result === 'failed') {
      one.sawFailure = true;
      this.#detail.failed_fetches++;
    } else {
      if (result === 'corrupt') {
        one.sawCorrupt = true;
        this.#counts.corrupt++;
        this.#tellCorrupt(one.namespace, one.hash, bitsOf(index));
      }
      this.#followers.removed(one.namespace, this.#directory.remove(one.namespace, [one.hash], bitsOf(index)));
    }
    if (performance.now() < one.deadlineMs && (this.#directory.holders(one.namespace, one.hash) & ~one.tried) !== 0) {
      this.#detail.second_tries++;
    }
    this.#fetch([one]);
  }

  #end(one: Waiting, full: boolean): void {
    one.onDone(one.sawCorrupt ? 'corrupt' : one.sawFailure || full ? 'failed' : 'missing');
  }

  #tellCorrupt(namespace: Namespace, hash: HashKey, bits: number): void {
    const holders = this.#directory.holders(namespace, hash) & bits;
    for (const [index, peer] of this.#peers.entries()) {
      if ((holders & bitsOf(index)) !== 0) peer.hint({ kind: 'hint', what: 'corrupt', namespace, hashes: [hash] });
    }
  }

  #changed(peer: number, { tier, change, namespace, hashes }: ChangeMessage): void {
    const bits = bitOf(peer, tier);
    if (change === 'cleared' || namespace === null) this.#dropped(bits);
    else if (change === 'stored') {
      this.#followers.stored(namespace, this.#directory.add(namespace, hashes, bits));
    } else this.#followers.removed(namespace, this.#directory.remove(namespace, hashes, bits));
  }

  #dropped(bits: number): void {
    for (const [namespace, gone] of this.#directory.drop(bits)) this.#followers.removed(namespace, gone);
  }
}
