/**
 * Prompts from which the index learns the order of blocks that tiers told of without one: a few wait, a slice of one a turn, so that no
 * request waits for it.
 */
import type { Keys, KvIndex } from '../kv-index.ts';
import type { Turns } from './turns.ts';

/** A prompt with so many blocks of no known order is worth learning from. */
const worthLearning = 32;
const maxWaiting = 16;
const sliceBlocks = 4_096;

export class Learning {
  readonly #index: KvIndex;
  readonly #turns: Turns;
  readonly #waiting: Keys[] = [];
  #isBusy = false;

  constructor(index: KvIndex, turns: Turns) {
    this.#index = index;
    this.#turns = turns;
  }

  /** A prompt was looked up, and so many of its blocks had no known order. */
  met(keys: Keys, looseBlocks: number): void {
    if (looseBlocks < worthLearning || this.#waiting.length >= maxWaiting) return;
    this.#waiting.push(keys);
    if (!this.#isBusy) void this.#learnAll();
  }

  close(): void {
    this.#waiting.length = 0;
  }

  async #learnAll(): Promise<void> {
    this.#isBusy = true;
    for (let keys = this.#waiting.shift(); keys; keys = this.#waiting.shift()) {
      for (let at = 0; at < keys.length; at += 2 * sliceBlocks) {
        await this.#turns.next();
        this.#index.learn(keys.subarray(at, at + 2 * sliceBlocks), at === 0 ? 'root' : keys.subarray(at - 2, at));
      }
    }
    this.#isBusy = false;
  }
}
