/**
 * One load: a chain that is being brought into the arena, then a lease on the part that arrived.
 *
 *     blocks  0 ────────────── emitted ───────────── limit ───── hashes.length
 *             told to the engine │ pinned or on the way │ given up, with `reason`
 *
 * A block that cannot be had now ends the chain, or is awaited (awaiting.ts) until it comes. So it is while the block after the last
 * that was told is awaited: `awaitMs` after that one was told, or after the beginning, the load ends. What is on its way is not
 * awaited: only the deadline ends that.
 *
 * Invariants: `onReady` sees every block below `loaded` exactly once, in chain order; what is emitted stays pinned until
 * `release`, nothing beyond it is wanted after the end; the end comes exactly once, at the latest at the deadline. What is wanted no
 * more is let go over several turns (block-turns.ts), and before its session pins as much for another load: what a session leases and
 * what it has let go together stay within its bound.
 */
import type { HashKey } from '@kvtier/identity';
import type { Clock } from '@kvtier/runtime';
import type { ArenaBlock } from '@kvtier/tiers';
import type { Awaiting } from './awaiting.ts';
import type { BlockTurns } from './block-turns.ts';
import type { Counters } from './counters.ts';
import type { Fetcher } from './fetcher.ts';
import type { AwaitClient, FetchClient, FetchFailure, FetchRequest, NamespaceState, Waiter } from './fetches.ts';
import type { StoreLimits } from './limits.ts';
import type { Pins } from './pins.ts';
import type { ArenaTop } from './ports.ts';
import { type Steps, stepping } from './steps.ts';
import type { TierGate } from './tier-gate.ts';

/** '' = complete. 'cancelled': ended, released, or its session ended, before it was complete. */
export type LoadReason = '' | FetchFailure | 'deadline' | 'awaited' | 'cancelled';

export interface LoadEvents {
  /** Blocks `first`.. are leased and may be read. In chain order, without a gap. */
  onReady(first: number, blocks: readonly ArenaBlock[], tier: string): void;
  /** Exactly once, after the last `onReady`, never from inside `Load.start`'s caller. */
  onDone(loaded: number, reason: LoadReason): void;
}

/** What the loads of one session have in common. */
export interface LoadingSession {
  /** How many blocks it waits for. */
  awaited: number;
  /** What lets go of blocks, and has not ended, in its order. */
  leaving?: Set<Steps<void>>;
}

export interface LoadOptions {
  readonly arena: ArenaTop;
  readonly pins: Pins;
  readonly fetcher: Fetcher;
  readonly clock: Clock;
  readonly counters: Counters;
  /** The lower tier that holds a block, if one does. */
  readonly locate: (state: NamespaceState, hash: HashKey) => TierGate | undefined;
  /** A block is being read by an engine, which knows of it already. */
  readonly onUsed: (state: NamespaceState, hash: HashKey, fresh: boolean) => void;
  /** The first `loaded` blocks are told to the engine, and no more; after `onDone`. */
  readonly onOver: (loaded: number) => void;
  readonly isOver: (expiresS: number) => boolean;
  readonly limits: StoreLimits;
  readonly awaiting: Awaiting;
  readonly blockTurns: BlockTurns;
  readonly session: LoadingSession;
  readonly tenant: number;
  /** Blocks that this session may still lease. */
  readonly maxBlocks: number;
}

interface Arrived extends ArenaBlock {
  readonly hash: HashKey;
  readonly tier: string;
}

export class Load implements FetchClient, AwaitClient {
  readonly state: NamespaceState;
  readonly priority = 'demand';
  readonly tenant: number;
  readonly session: LoadingSession;
  readonly hashes: readonly HashKey[];
  readonly #options: LoadOptions;
  readonly #events: LoadEvents;
  readonly #arrived: (Arrived | undefined)[];
  /** Told to the engine, and not counted as used yet. */
  #told: Arrived[] = [];
  /** Indexes of blocks that lower tiers hold and that were not asked for yet, from `#wantedNext` on. */
  #wanted: number[] = [];
  #wantedNext = 0;
  /** The fetcher asks for more of them by itself. */
  #isServed = false;
  /** Of blocks that are awaited, by index. */
  readonly #waiters = new Map<number, Waiter>();
  /** Else it ends with what is there when it begins: nothing is read for it. */
  #takesTime = true;
  /** 0: nothing is awaited. */
  #awaitMs = 0;
  /** When the last block was told, or the load began. */
  #toldUs = 0;
  #cancelWindow: (() => void) | undefined;
  #emitted = 0;
  #limit: number;
  #reason: LoadReason = '';
  #ended = false;
  #released = false;
  #flushQueued = false;
  #cancelTimer: () => void = () => {};
  /** While blocks at the chain's end have not been looked at. */
  #cancelBegin: (() => void) | undefined;

  constructor(state: NamespaceState, hashes: readonly HashKey[], options: LoadOptions, events: LoadEvents) {
    this.state = state;
    this.hashes = hashes;
    this.tenant = options.tenant;
    this.session = options.session;
    this.#options = options;
    this.#events = events;
    this.#arrived = new Array<Arrived | undefined>(hashes.length).fill(undefined);
    this.#limit = hashes.length;
  }

  /** Pins what is in the arena now and asks for the rest. A deadline of 0 ends with what is there. `awaitMs` 0: so does what is not held. */
  start(deadlineMs: number, awaitMs: number): void {
    const { clock } = this.#options;
    this.#takesTime = deadlineMs > 0;
    this.#awaitMs = this.#takesTime ? awaitMs : 0;
    this.#toldUs = clock.nowUs();
    this.#begin(0);
    if (this.#takesTime && (this.#cancelBegin !== undefined || this.#wanted.length + this.#waiters.size > 0)) {
      this.#cancelTimer = clock.after(deadlineMs, () => this.#end('deadline'));
      this.fetch();
    }
    this.#queueFlush();
  }

  /** What becomes of blocks `from`.. as far as this turn goes; of those behind them in a later one. */
  #begin(from: number): void {
    const { arena, locate, clock, maxBlocks, isOver } = this.#options;
    this.#cancelBegin = undefined;
    const end = from + stepping.looked;
    this.#makeRoom(Math.min(this.#limit, end) - from);
    for (let index = from; index < Math.min(this.#limit, end); index++) {
      const hash = this.hashes[index]!;
      const block = arena.get(this.state.namespace, hash);
      const payloadBytes = block?.payloadBytes;
      if (index >= maxBlocks) this.#give(index, 'capacity');
      else if (block !== undefined && isOver(block.expiresS)) this.#lack(index, 'missing');
      else if (payloadBytes === this.state.payloadBytes) this.#pin(index, arena.name);
      else {
        // A foreign layout under our name: never used, and not in the way of the real one.
        if (payloadBytes !== undefined) this.#options.pins.remove(this.state.namespace, [hash], 'corrupt');
        if (locate(this.state, hash) === undefined) this.#lack(index, 'missing');
        else if (this.#takesTime) this.#wanted.push(index);
        else this.#give(index, 'deadline');
      }
    }
    if (this.#limit <= end) return;
    this.#cancelBegin = clock.after(0, () => {
      this.#begin(end);
      this.fetch();
      this.#queueFlush();
    });
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

  /** What was awaited comes in any order: some of it may lie beyond the end that the chain has by now. */
  next(): FetchRequest | undefined {
    for (let index = this.#wanted[this.#wantedNext]; index !== undefined; index = this.#wanted[this.#wantedNext]) {
      if (this.wants(index)) return { index, hash: this.hashes[index]! };
      this.#wantedNext++;
    }
    this.#wanted = [];
    this.#wantedNext = 0;
    this.#isServed = false;
    return undefined;
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
    this.#lack(index, reason);
    this.#queueFlush();
  }

  came(index: number): void {
    this.#waiters.delete(index);
    this.#pin(index, this.#options.arena.name);
    this.#queueFlush();
  }

  listed(index: number): void {
    this.#waiters.delete(index);
    this.#wanted.push(index);
  }

  fetch(): void {
    if (this.#isServed || this.#wanted.length === 0) return;
    this.#isServed = true;
    this.#options.fetcher.add(this);
  }

  /** The engine has finished reading. Ends a load that is still running. Returns false when it was released before. */
  release(): boolean {
    if (this.#released) return false;
    this.#end('cancelled');
    this.#released = true;
    this.#letGo(0, this.#limit);
    return true;
  }

  /** No more blocks; what was told to the engine stays leased until `release`. */
  cancel(): void {
    this.#end('cancelled');
  }

  /** The same, with what is ready now. Returns false when it had ended. */
  endEarly(): boolean {
    if (this.#ended) return false;
    this.#flush();
    this.#end('cancelled');
    return true;
  }

  #pin(index: number, tier: string): void {
    const { arena, pins } = this.#options;
    const { namespace } = this.state;
    const hash = this.hashes[index]!;
    const { slot, payloadBytes, checksum, expiresS } = arena.get(namespace, hash)!;
    pins.pin(namespace, hash);
    this.#arrived[index] = { slot, payloadBytes, checksum, expiresS, hash, tier };
  }

  /** Nobody reads these any more. */
  #letGo(from: number, to: number): void {
    const { blockTurns } = this.#options;
    let first = from;
    while (first < to && this.#arrived[first] === undefined) first++;
    if (first >= to) return;
    const leaving = this.session.leaving ?? new Set();
    this.session.leaving = leaving;
    const work = this.#unpinning(first, to);
    leaving.add(work);
    blockTurns.add(work, () => leaving.delete(work));
  }

  /** From the end on: whoever needs room meanwhile can have the end of a chain, and nothing before it. */
  *#unpinning(from: number, to: number): Steps<void> {
    for (let index = to - 1; index >= from; index--) {
      if (this.#arrived[index] === undefined) continue;
      this.#arrived[index] = undefined;
      this.#options.pins.unpin(this.state.namespace, this.hashes[index]!);
      yield;
    }
  }

  /** So many blocks that its session has let go are unpinned now, if there are any. */
  #makeRoom(blocks: number): void {
    let left = blocks;
    for (const work of this.session.leaving ?? []) while (left > 0 && !work.next().done) left--;
  }

  /** The block cannot be had now: it is awaited, if there is time and room for that; else the chain ends before it. */
  #lack(index: number, reason: FetchFailure): void {
    if (this.#awaitMs === 0 || reason === 'capacity') {
      this.#give(index, reason);
      return;
    }
    const { awaiting, counters, limits } = this.#options;
    const mayWait = this.#waiters.size < limits.maxAwaitedOfLoad;
    if (!mayWait) counters.add('await.refused.load_limit');
    const waiter = mayWait ? awaiting.add(this, index, this.hashes[index]!, reason) : undefined;
    if (waiter === undefined) this.#give(index, 'capacity');
    else this.#waiters.set(index, waiter);
  }

  /** The chain ends at `index`. */
  #give(index: number, reason: LoadReason): void {
    const before = this.#limit;
    this.#limit = index;
    this.#reason = reason;
    for (let beyond = index; beyond < before && this.#waiters.size > 0; beyond++) {
      const waiter = this.#waiters.get(beyond);
      if (waiter === undefined) continue;
      this.#waiters.delete(beyond);
      this.#options.awaiting.delete(waiter);
    }
    this.#letGo(index, before);
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
      else {
        this.#use();
        this.#watchWindow();
      }
    });
  }

  /** Ends the load when the next block has been awaited for too long. One timer; it is set anew when it fires, not with each block. */
  #watchWindow(): void {
    if (this.#ended || this.#cancelWindow !== undefined || !this.#waiters.has(this.#emitted)) return;
    const { clock } = this.#options;
    const leftUs = this.#toldUs + this.#awaitMs * 1000 - clock.nowUs();
    if (leftUs <= 0) {
      this.#end('awaited');
      return;
    }
    this.#cancelWindow = clock.after(Math.ceil(leftUs / 1000), () => {
      this.#cancelWindow = undefined;
      this.#watchWindow();
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
      this.#toldUs = this.#options.clock.nowUs();
      this.#events.onReady(first, blocks, tier);
      this.#told.push(...blocks);
    }
  }

  /** When the engine has its answers: what tiers are to do with blocks that it uses waits for nobody. */
  #use(): void {
    const { onUsed, arena } = this.#options;
    const { namespace } = this.state;
    for (const { hash, tier } of this.#told)
      if (arena.get(namespace, hash) !== undefined) onUsed(this.state, hash, tier !== arena.name);
    this.#told = [];
  }

  #end(reason: LoadReason): void {
    if (this.#ended) return;
    if (reason !== 'cancelled') this.#flush();
    this.#ended = true;
    this.#cancelTimer();
    this.#cancelBegin?.();
    this.#cancelWindow?.();
    if (this.#emitted < this.#limit) this.#give(this.#emitted, reason);
    this.#options.counters.add(`load.ended.${this.#reason === '' ? 'complete' : this.#reason}`);
    this.#events.onDone(this.#emitted, this.#reason);
    this.#use();
    this.#options.onOver(this.#emitted);
  }
}
