/**
 * Work on many blocks in turns of the event loop: what a publisher says in one message may be more than a turn has room for. Blocks that
 * become sets of holders of their own count for more than others: they cost more.
 */
import type { Keys, KvIndex } from '../kv-index.ts';

/** Blocks that are dealt with in one turn: a few milliseconds. */
export const turnBlocks = 4_096;
/** At once: where each has a set of its own, so many take some milliseconds, too. */
const sliceBlocks = 512;

export function* slices(keys: Keys): Generator<Keys, void> {
  for (let at = 0; at < keys.length; at += 2 * sliceBlocks) yield keys.subarray(at, at + 2 * sliceBlocks);
}

/** Of one publisher: it may send many messages at once. */
export class Slicer {
  readonly #index: KvIndex;
  /** Since it yielded last. */
  #done = 0;

  constructor(index: KvIndex) {
    this.#index = index;
  }

  /** Goes on with `work`, which says how many blocks it has dealt with, and yields each time that a turn has had enough of it. */
  *inTurns(work: Iterable<number>): Generator<void, void> {
    let before = this.#index.setWork;
    for (const blocks of work) {
      this.#done += blocks + this.#index.setWork - before;
      if (this.#done >= turnBlocks) {
        this.#done = 0;
        yield;
      }
      before = this.#index.setWork; // others go on meanwhile
    }
  }
}
