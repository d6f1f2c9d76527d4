/**
 * A run: consecutive blocks of one chain, and who holds them. Blocks that came one after another, held by the same, share one
 * entry of 16 bytes; where holders differ a new segment begins.
 *
 *     place     0               5        8            12
 *     segments  [ {A, B}        [ {A}    [ nobody     ]  end
 *
 * Places never move: a block's record names its run and its place, and stays right whatever is split or joined here.
 */

/** The set of a segment that nobody holds and no record names. Other sets may have become empty since: their records are swept later. */
export const empty = 0;

export class Run {
  /** Hash of the block before place 0; 0, 0 at the root of a chain. */
  readonly parentLow: number;
  readonly parentHigh: number;
  /**
   * Of each segment its first place and its set, one after the other: places ascend from 0. One array, as who asks waits for each that
   * lies in no cache.
   */
  readonly #segments: number[] = [];
  /** Places are below this. */
  end = 0;
  /** No block follows the last one any more: its place may be named by old records. */
  closed = false;
  /** Records that name this run. */
  records = 0;
  /** When it was last used; larger is later. */
  stamp: number;

  constructor(parentLow: number, parentHigh: number, stamp: number) {
    this.parentLow = parentLow;
    this.parentHigh = parentHigh;
    this.stamp = stamp;
  }

  get segments(): number {
    return this.#segments.length >>> 1;
  }

  /** The number of the segment that a place below `end` lies in. */
  segmentAt(place: number): number {
    let low = 0;
    let high = this.segments - 1;
    while (low < high) {
      const middle = (low + high + 1) >>> 1;
      if (this.#startOf(middle) <= place) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** One past the last place of a segment. */
  endOf(segment: number): number {
    return segment + 1 < this.segments ? this.#startOf(segment + 1) : this.end;
  }

  setOf(segment: number): number {
    return this.#segments[2 * segment + 1]!;
  }

  /** One block more at the end; its place. */
  append(set: number): number {
    if (this.segments === 0 || this.setOf(this.segments - 1) !== set) this.#segments.push(this.end, set);
    return this.end++;
  }

  /** Changes the sets of places from ... to - 1. */
  update(from: number, to: number, change: (set: number, blocks: number) => number): void {
    this.#cut(from);
    this.#cut(to);
    const first = this.segmentAt(from);
    let last = first;
    while (last < this.segments && this.#startOf(last) < to) {
      this.rename(last, change(this.setOf(last), this.endOf(last) - this.#startOf(last)));
      last++;
    }
    for (let i = Math.min(last, this.segments - 1); i >= Math.max(first, 1); i--)
      if (this.setOf(i) === this.setOf(i - 1)) this.#segments.splice(2 * i, 2);
  }

  /** Drops segments that nobody holds from the end. */
  shrink(isEmpty: (set: number) => boolean): void {
    while (this.segments > 0 && isEmpty(this.setOf(this.segments - 1))) {
      if (this.#segments.pop() !== empty) this.closed = true;
      this.end = this.#segments.pop()!;
    }
  }

  /** Forgets what it says; its records are stale. */
  forget(): void {
    this.#segments.length = 0;
    this.end = 0;
    this.closed = true;
  }

  /** The segment's set has another number now. */
  rename(segment: number, set: number): void {
    this.#segments[2 * segment + 1] = set;
  }

  #startOf(segment: number): number {
    return this.#segments[2 * segment]!;
  }

  #cut(place: number): void {
    if (place >= this.end) return;
    const segment = this.segmentAt(place);
    if (this.#startOf(segment) !== place) this.#segments.splice(2 * segment + 2, 0, place, this.setOf(segment));
  }
}
