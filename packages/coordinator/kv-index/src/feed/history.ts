/**
 * What a worker was sent, as a guess of what it holds, where nothing tells: the blocks of the latest prompts, as many as the worker can
 * hold at most, each for a while only. Two generations: prompts go to the young one; when that is half full, or half its time is over, the
 * old one is forgotten and the young one becomes old. So what is used stays, without a list of blocks beside the index.
 */
import type { Keys, KvIndex } from '../kv-index.ts';
import { mediumNumbers } from './media.ts';

export interface HistoryOptions {
  /** Blocks that the worker has. */
  readonly maxBlocks: number;
  readonly ttlMs: number;
}

export class History {
  readonly #index: KvIndex;
  readonly #options: HistoryOptions;
  #young: number;
  #old: number;
  #youngBlocks = 0;
  #sinceMs: number;

  /** undefined: there are too many publishers, and the index has no room to tell this one from others. */
  static begin(index: KvIndex, options: HistoryOptions, nowMs: number): History | undefined {
    return index.freeSources < 2 ? undefined : new History(index, options, nowMs);
  }

  private constructor(index: KvIndex, options: HistoryOptions, nowMs: number) {
    this.#index = index;
    this.#options = options;
    this.#young = index.addSource();
    this.#old = index.addSource();
    this.#sinceMs = nowMs;
  }

  get sources(): readonly number[] {
    return [this.#young, this.#old];
  }

  sent(keys: Keys, nowMs: number): void {
    this.expire(nowMs);
    const half = Math.max(1, Math.floor(this.#options.maxBlocks / 2));
    const fits = keys.subarray(0, 2 * half);
    let known = this.#index.match(fits, [{ sources: [this.#young] }])[0]!.blocks;
    if (this.#youngBlocks + fits.length / 2 - known > half) {
      this.#turn(nowMs);
      known = 0;
    }
    this.#youngBlocks += fits.length / 2 - known;
    const parent = known === 0 ? 'root' : fits.subarray(2 * known - 2, 2 * known);
    this.#index.stored(this.#young, mediumNumbers.gpu, fits.subarray(2 * known), parent);
  }

  /** To be called now and then: what has been there for too long is forgotten. */
  expire(nowMs: number): void {
    const { ttlMs } = this.#options;
    const overMs = nowMs - this.#sinceMs;
    if (overMs >= ttlMs / 2) this.#turn(nowMs);
    if (overMs >= ttlMs) this.#turn(nowMs);
  }

  close(): void {
    this.#index.removeSource(this.#young);
    this.#index.removeSource(this.#old);
  }

  #turn(nowMs: number): void {
    this.#index.cleared(this.#old);
    [this.#young, this.#old] = [this.#old, this.#young];
    this.#youngBlocks = 0;
    this.#sinceMs = nowMs;
  }
}
