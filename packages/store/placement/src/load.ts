/**
 * One load: a chain that is being brought into the arena, then a lease on the part that arrived.
 *
 *     blocks  0 ────────────── emitted ───────────── limit ───── hashes.length
 *             told to the engine │ pinned or on the way │ given up, with `reason`
 *
 * Invariants: `onReady` sees every block below `loaded` exactly once, in chain order; what is emitted stays pinned until
 * `release`, nothing beyond it stays pinned after the end; the end comes exactly once, at the latest at the deadline.
 */
import type { HashKey } from '@kvtier/identity';
import type { Clock } from '@kvtier/runtime';
import type { ArenaBlock } from '@kvtier/tiers';
import type { Counters } from './counters.ts';
import type { Fetcher } from './fetcher.ts';
import type { FetchClient, FetchFailure, FetchRequest, NamespaceState } from './fetches.ts';
import type { Pins } from './pins.ts';
import type { ArenaTop } from './ports.ts';
import type { TierGate } from './tier-gate.ts';

/** '' = complete. 'cancelled': released, or its session ended, before it was complete. */
export type LoadReason = '' | FetchFailure | 'deadline' | 'cancelled';

export interface LoadEvents {
  /** Blocks `first`.. are leased and may be read. In chain order, without a gap. */
  onReady(first: number, blocks: readonly ArenaBlock[], tier: string): void;
  /** Exactly once, after the last `onReady`, never from inside `Load.start`'s caller. */
  onDone(loaded: number, reason: LoadReason): void;
}

export interface LoadOptions {
  readonly arena: ArenaTop;
  readonly pins: Pins;
  readonly fetcher: Fetcher;
  readonly clock: Clock;
  readonly counters: Counters;
  /** The lower tier that holds a block, if one does. */
  readonly locate: (state: NamespaceState, hash: HashKey) => TierGate | undefined;
  /** A block is being read by an engine. */
  readonly onUsed: (state: NamespaceState, hash: HashKey, fresh: boolean) => void;
  readonly isOver: (expiresS: number) => boolean;
  readonly tenant: number;
  /** Blocks that this session may still lease. */
  readonly maxBlocks: number;
}

interface Arrived extends ArenaBlock {
  readonly tier: string;
}

export class Load implements FetchClient {
  readonly state: NamespaceState;
  readonly priority = 'demand';
  readonly tenant: number;
  readonly hashes: readonly HashKey[];
  readonly #options: LoadOptions;
  readonly #events: LoadEvents;
  readonly #arrived: (Arrived | undefined)[];
  /** Indexes of blocks that are not in the arena. */
  readonly #wanted: number[] = [];
  #wantedNext = 0;
  #emitted = 0;
  #limit: number;
  #reason: LoadReason = '';
  #ended = false;
  #released = false;
  #flushQueued = false;
  #cancelTimer: () => void = () => {};

  constructor(state: NamespaceState, hashes: readonly HashKey[], options: LoadOptions, events: LoadEvents) {
    this.state = state;
    this.hashes = hashes;
    this.tenant = options.tenant;
    this.#options = options;
    this.#events = events;
    this.#arrived = new Array<Arrived | undefined>(hashes.length).fill(undefined);
    this.#limit = hashes.length;
  }

  /** Pins what is in the arena now and asks for the rest. A deadline of 0 ends with what is there. */
  start(deadlineMs: number): void {
    const { arena, locate, fetcher, clock, maxBlocks, isOver } = this.#options;
    for (let index = 0; index < this.#limit; index++) {
      const hash = this.hashes[index]!;
      const block = arena.get(this.state.namespace, hash);
      const payloadBytes = block?.payloadBytes;
      if (index >= maxBlocks) this.#give(index, 'capacity');
      else if (block !== undefined && isOver(block.expiresS)) this.#give(index, 'missing');
      else if (payloadBytes === this.state.payloadBytes) this.#pin(index, arena.name);
      else {
        // A foreign layout under our name: never used, and not in the way of the real one.
        if (payloadBytes !== undefined) this.#options.pins.remove(this.state.namespace, [hash], 'corrupt');
        if (locate(this.state, hash) === undefined) this.#give(index, 'missing');
        else this.#wanted.push(index);
      }
    }
    if (this.#wanted.length > 0) {
      if (deadlineMs === 0) this.#give(this.#wanted[0]!, 'deadline');
      else {
        this.#cancelTimer = clock.after(deadlineMs, () => this.#end('deadline'));
        fetcher.add(this);
      }
    }
    this.#queueFlush();
  }

  get ended(): boolean {
    return this.#ended;
  }

  /** Blocks pinned or still wanted: what it counts against its session. */
  get leasedBlocks(): number {
    return this.#released ? 0 : this.#limit;
  }

  /** The engine was given this block. */
  isLeased(index: number): boolean {
    return index < this.#emitted && this.#arrived[index] !== undefined;
  }

  next(): FetchRequest | undefined {
    const index = this.#wanted[this.#wantedNext];
    return index === undefined || !this.wants(index) ? undefined : { index, hash: this.hashes[index]! };
  }

  advance(): void {
    this.#wantedNext++;
  }

  wants(index: number): boolean {
    return !this.#ended && index < this.#limit;
  }

  arrived(index: number, tier: string): void {
    if (!this.wants(index)) return;
    this.#pin(index, tier);
    this.#queueFlush();
  }

  failed(index: number, reason: FetchFailure): void {
    if (!this.wants(index)) return;
    this.#give(index, reason);
    this.#queueFlush();
  }

  /** The engine has finished reading. Ends a load that is still running. Returns false when it was released before. */
  release(): boolean {
    if (this.#released) return false;
    this.#end('cancelled');
    this.#released = true;
    for (let index = 0; index < this.#limit; index++) this.#unpin(index);
    return true;
  }

  /** No more blocks; what was told to the engine stays leased until `release`. */
  cancel(): void {
    this.#end('cancelled');
  }

  #pin(index: number, tier: string): void {
    const { arena, pins } = this.#options;
    const { namespace } = this.state;
    const hash = this.hashes[index]!;
    const block = arena.get(namespace, hash)!;
    pins.pin(namespace, hash);
    this.#options.onUsed(this.state, hash, tier !== arena.name);
    const { slot, payloadBytes, checksum, expiresS } = block;
    this.#arrived[index] = { slot, payloadBytes, checksum, expiresS, tier };
  }

  #unpin(index: number): void {
    if (this.#arrived[index] === undefined) return;
    this.#arrived[index] = undefined;
    this.#options.pins.unpin(this.state.namespace, this.hashes[index]!);
  }

  /** The chain ends at `index`. */
  #give(index: number, reason: LoadReason): void {
    const before = this.#limit;
    this.#limit = index;
    this.#reason = reason;
    for (let beyond = index; beyond < before; beyond++) this.#unpin(beyond);
  }

  /** Once per turn, so that blocks which arrive together travel together; `onDone` never comes from inside `start`. */
  #queueFlush(): void {
    if (this.#flushQueued) return;
    this.#flushQueued = true;
    queueMicrotask(() => {
      this.#flushQueued = false;
      if (this.#ended) return;
      this.#flush();
      if (this.#emitted === this.#limit) this.#end(this.#reason);
    });
  }

  #flush(): void {
    while (this.#emitted < this.#limit) {
      const first = this.#emitted;
      const tier = this.#arrived[first]?.tier;
      if (tier === undefined) return;
      const blocks: Arrived[] = [];
      for (let block = this.#arrived[first]; block?.tier === tier; block = this.#arrived[first + blocks.length]) {
        blocks.push(block);
      }
      this.#emitted += blocks.length;
      this.#events.onReady(first, blocks, tier);
    }
  }

  #end(reason: LoadReason): void {
    if (this.#ended) return;
    if (reason !== 'cancelled') this.#flush();
    this.#ended = true;
    this.#cancelTimer();
    if (this.#emitted < this.#limit) this.#give(this.#emitted, reason);
    this.#options.counters.add(`load.ended.${this.#reason === '' ? 'complete' : this.#reason}`);
    this.#events.onDone(this.#emitted, this.#reason);
  }
}
