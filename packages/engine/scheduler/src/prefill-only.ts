/**
 * What has become of the blocks that a request computes for another worker: offered to the tier piece by piece, in chain order,
 * and held by it or not, as the answers come, in any order. Pure.
 */
import type { PrefillOnlyParams } from './types.ts';

export class PrefillOnly {
  /** Whole blocks of the prompt, from the first on: all that is computed. */
  readonly blocks: number;
  /** Of one step at most. */
  readonly stepBlocks: number;
  /** The rest of the prompt is computed, too, and the token behind it is drawn. */
  readonly draws: boolean;
  /** Offered, and not answered yet. */
  unsettled = 0;
  /** Somebody else was writing some of it: it is offered again. */
  isBusy = false;
  /** Not offered again at once, but when a timer says so. */
  isPaused = false;
  pauses = 0;
  /** When the first of them began. */
  pausedUs: number | undefined;
  /** Of the boot of the cache node that it is offered to, and that holds what is held. */
  epoch: bigint | undefined;
  #ready = 0;
  /** Held pieces behind a gap, as [first, end), in no order. */
  #beyond: (readonly [number, number])[] = [];

  constructor({ blocks, stepBlocks = 0, draws = false }: PrefillOnlyParams) {
    this.blocks = blocks;
    this.stepBlocks = stepBlocks || Number.POSITIVE_INFINITY;
    this.draws = draws;
  }

  /** Blocks from the first on, without a gap, that the tier holds. */
  get readyBlocks(): number {
    return this.#ready;
  }

  /** The cache node has started anew: nothing counts that it held before, nor how often it was asked. */
  startOver(epoch: bigint): void {
    this.epoch = epoch;
    this.pauses = 0;
    this.pausedUs = undefined;
    this.#ready = 0;
    this.#beyond = [];
  }

  /** The tier holds blocks `first`..`end`-1 of the prompt. True: more lie there without a gap than before. */
  held(first: number, end: number): boolean {
    const before = this.#ready;
    if (end > first && end > before) this.#beyond.push([first, end]);
    for (let grown = true; grown; ) {
      grown = false;
      this.#beyond = this.#beyond.filter(([from, to]) => {
        if (from > this.#ready) return true;
        grown ||= to > this.#ready;
        this.#ready = Math.max(this.#ready, to);
        return false;
      });
    }
    return this.#ready > before;
  }
}
