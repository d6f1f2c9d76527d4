/**
 * A ring of points, 256 of each worker, whose places follow from what it is called. One number a point: its place on the ring, and behind
 * it the worker's number, so that the ring is sorted as numbers are. A worker's points stay where they are; who joins is merged in, and
 * nothing is sorted anew for it.
 *
 *     ring    at₀·2²⁰+w₀  <  at₁·2²⁰+w₁  <  …            32 bits and 20: exact in a double
 */
import { hashText, mix32 } from '../hashing.ts';

const pointsPerWorker = 256;
const workerSpan = 2 ** 20;

export class HashRing {
  #points = new Float64Array(0);
  /** By number: it has points, or will have when the ring is settled. */
  readonly #isOn: boolean[] = [];
  /** What is to be done, in one go for many: who loses all points, and who gets some, by what. */
  readonly #gone = new Set<number>();
  readonly #fresh = new Map<number, readonly [number, number]>();

  get length(): number {
    return this.#points.length;
  }

  has(worker: number): boolean {
    return this.#isOn[worker] === true;
  }

  /** `name`: what it is called everywhere; undefined: nothing but its number. One that is there stays as it is. */
  add(worker: number, name: string | undefined): void {
    if (this.has(worker)) return;
    this.#isOn[worker] = true;
    // Two words of a name: among thousands no two have the same points.
    this.#fresh.set(worker, name === undefined ? [worker + 1, 1] : [hashText(name), hashText(` ${name}`)]);
  }

  drop(worker: number): void {
    if (!this.has(worker)) return;
    this.#isOn[worker] = false;
    if (!this.#fresh.delete(worker)) this.#gone.add(worker);
  }

  /** From now on it is as it was told. */
  settle(): void {
    if (this.#gone.size > 0) this.#points = this.#points.filter((point) => !this.#gone.has(point % workerSpan));
    this.#gone.clear();
    if (this.#fresh.size === 0) return;
    const fresh = new Float64Array(this.#fresh.size * pointsPerWorker);
    let n = 0;
    for (const [worker, [low, high]] of this.#fresh)
      for (let i = 0; i < pointsPerWorker; i++) fresh[n++] = mix32(low, high + i) * workerSpan + worker;
    this.#points = merged(this.#points, fresh.sort());
    this.#fresh.clear();
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
