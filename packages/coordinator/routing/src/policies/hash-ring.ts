/**
 * A ring of points, 256 of each worker. One number a point: its place on the ring, and behind it the worker's number, so that the ring
 * is sorted as numbers are. A worker's points stay where they are; who joins is merged in, and nothing is sorted anew for it.
 *
 *     ring    at₀·2²⁰+w₀  <  at₁·2²⁰+w₁  <  …            32 bits and 20: exact in a double
 */
import { mix32 } from '../hashing.ts';

const pointsPerWorker = 256;
const workerSpan = 2 ** 20;

export class HashRing {
  #points = new Float64Array(0);
  #workers = 0;

  get length(): number {
    return this.#points.length;
  }

  /** Workers 0 to `count` - 1 have points from now on. Those of numbers beyond it stay: they are again what they were when they come again. */
  grow(count: number): void {
    if (count <= this.#workers) return;
    const fresh = new Float64Array((count - this.#workers) * pointsPerWorker);
    let n = 0;
    for (let worker = this.#workers; worker < count; worker++)
      for (let i = 0; i < pointsPerWorker; i++) fresh[n++] = mix32(worker + 1, i + 1) * workerSpan + worker;
    this.#points = merged(this.#points, fresh.sort());
    this.#workers = count;
  }

  /** The worker of a point; they follow each other from `place` on. */
  workerAt(place: number): number {
    return this.#points[place % this.#points.length]! % workerSpan;
  }

  /** The first point at or after `at`. */
  find(at: number): number {
    const place = firstFrom(this.#points, at * workerSpan, 0);
    return place === this.#points.length ? 0 : place;
  }
}

/** In stretches: between two points that come, all others are copied at once. */
function merged(old: Float64Array, fresh: Float64Array): Float64Array<ArrayBuffer> {
  const all = new Float64Array(old.length + fresh.length);
  let from = 0;
  for (let i = 0; i < fresh.length; i++) {
    const to = firstFrom(old, fresh[i]!, from);
    if (to > from) all.set(old.subarray(from, to), from + i);
    all[to + i] = fresh[i]!;
    from = to;
  }
  all.set(old.subarray(from), from + fresh.length);
  return all;
}

/** The place of the first one that is not below `point`, at `from` or after it. */
function firstFrom(points: Float64Array, point: number, from: number): number {
  let low = from;
  let high = points.length;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (points[middle]! < point) low = middle + 1;
    else high = middle;
  }
  return low;
}
