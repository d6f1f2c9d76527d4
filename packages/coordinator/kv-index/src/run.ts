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
  /** First place of each segment, ascending, the first one 0; and its set. */
  readonly #starts: number[] = [];
  readonly #sets: number[] = [];
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
    return this.#starts.length;
  }

  /** The number of the segment that a place below `end` lies in. */
  segmentAt(place: number): number {
    let low = 0;
    let high = this.#starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >>> 1;
      if (this.#starts[middle]! <= place) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** One past the last place of a segment. */
  endOf(segment: number): number {
    return segment + 1 < this.#starts.length ? this.#starts[segment + 1]! : this.end;
  }

  setOf(segment: number): number {
    return this.#sets[segment]!;
  }

  /** One block more at the end; its place. */
  append(set: number): number {
    const last = this.#sets.length - 1;
    if (last < 0 || this.#sets[last] !== set) {
      this.#starts.push(this.end);
      this.#sets.push(set);
    }
    return this.end++;
  }

  /** Changes the sets of places from ... to - 1. */
  update(from: number, to: number, change: (set: number) => number): void {
    this.#cut(from);
    this.#cut(to);
    const first = this.segmentAt(from);
    let last = first;
    while (last < this.#starts.length && this.#starts[last]! < to) {
      this.#sets[last] = change(this.#sets[last]!);
      last++;
    }
    for (let i = Math.min(last, this.#starts.length - 1); i >= Math.max(first, 1); i--) {
      if (this.#sets[i] !== this.#sets[i - 1]) continue;
      this.#starts.splice(i, 1);
      this.#sets.splice(i, 1);
    }
  }

  /** Drops segments that nobody holds from the end. */
  shrink(isEmpty: (set: number) => boolean): void {
    while (this.#sets.length > 0 && isEmpty(this.#sets[this.#sets.length - 1]!)) {
      if (this.#sets.pop() !== empty) this.closed = true;
      this.end = this.#starts.pop()!;
    }
  }

  /** Forgets what it says; its records are stale. */
  forget(): void {
    this.#starts.length = 0;
    this.#sets.length = 0;
    this.end = 0;
    this.closed = true;
  }

  /** The segment's set has another number now. */
  rename(segment: number, set: number): void {
    this.#sets[segment] = set;
  }

  #cut(place: number): void {
    if (place >= this.end) return;
    const segment = this.segmentAt(place);
    if (this.#starts[segment] === place) return;
    this.#starts.splice(segment + 1, 0, place);
    this.#sets.splice(segment + 1, 0, this.#sets[segment]!);
  }
}
