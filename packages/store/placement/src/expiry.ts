/**
 * Blocks whose time is over leave: a timing wheel (deadlines.ts) and one timer, for the earliest of them.
 *
 * Invariants: an entry lives as long as the block has its record in the index, and no longer (rows are record numbers there);
 * at most `batchBlocks` blocks are removed in one turn, however many end in the same second. Time is monotonic: a wall clock
 * that is put right moves nothing that is in here.
 */
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Clock } from '@kvtier/runtime';
import { Deadlines } from './deadlines.ts';

/** Rows that are put into a finer slot cost far less than a removal. */
const stepsPerBlock = 16;
/** Node's timers end there; one that is to be later is set anew then. */
const longestTimerMs = 2 ** 31 - 1;

export interface ExpiryOptions {
  readonly clock: Clock;
  readonly batchBlocks: number;
  readonly remove: (namespace: Namespace, hashes: readonly HashKey[]) => void;
}

export class Expiry {
  readonly #options: ExpiryOptions;
  readonly #deadlines: Deadlines;
  #timerS = Number.POSITIVE_INFINITY;
  #cancelTimer: () => void = () => {};

  constructor(options: ExpiryOptions) {
    this.#options = options;
    this.#deadlines = new Deadlines(Math.floor(options.clock.nowUs() / 1e6));
  }

  /** Blocks that will end. */
  get count(): number {
    return this.#deadlines.count;
  }

  get bytes(): number {
    return this.#deadlines.bytes;
  }

  /** The block with record number `row` ends in `ms`, at the next whole second. One that was set before is set anew. */
  set(row: number, namespace: Namespace, hash: HashKey, ms: number): void {
    const nowMs = this.#options.clock.nowUs() / 1000;
    const second = Math.min(Math.ceil((nowMs + Math.max(0, ms)) / 1000), 2 ** 32 - 1);
    this.#deadlines.set(row, namespace, hash, second, Math.floor(nowMs / 1000));
    this.#schedule();
  }

  /** Nothing holds the block any more. */
  delete(row: number): void {
    if (this.#deadlines.count === 0) return;
    this.#deadlines.delete(row);
    if (this.#deadlines.count === 0) this.#stop();
  }

  /** Remove what is over now, though its timer has not fired yet; one batch. */
  sweep(): void {
    if (this.#timerS <= this.#options.clock.nowUs() / 1e6) this.#run();
  }

  clear(): void {
    this.#stop();
    this.#deadlines.clear();
  }

  checkIntegrity(): void {
    this.#deadlines.checkIntegrity();
  }

  #stop(): void {
    this.#cancelTimer();
    this.#timerS = Number.POSITIVE_INFINITY;
  }

  /** The timer stands for the earliest second. */
  #schedule(): void {
    const { nextS } = this.#deadlines;
    if (nextS >= this.#timerS) return;
    this.#cancelTimer();
    this.#timerS = nextS;
    const ms = Math.max(0, nextS * 1000 - this.#options.clock.nowUs() / 1000);
    this.#cancelTimer = this.#options.clock.after(Math.min(Math.ceil(ms), longestTimerMs), () => this.#run());
  }

  #run(): void {
    this.#stop();
    const { clock, batchBlocks, remove } = this.#options;
    const over = this.#deadlines.take(Math.floor(clock.nowUs() / 1e6), batchBlocks, stepsPerBlock * batchBlocks);
    for (const [namespace, hashes] of over) remove(namespace, hashes);
    if (this.#deadlines.count > 0) this.#schedule();
  }
}
