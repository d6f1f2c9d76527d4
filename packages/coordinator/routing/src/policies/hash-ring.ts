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

/** Two of a name: among thousands no two have the same points. */
type Words = readonly [number, number];

const pointsOf = (worker: number, [low, high]: Words): number[] =>
  Array.from({ length: pointsPerWorker }, (_, i) => mix32(low, high + i) * workerSpan + worker);

export class HashRing {
  #points = new Float64Array(0);
  /** By number, what its points follow from: of all that have some, or will have when the ring is settled. */
  readonly #words = new Map<number, Words>();
  /** What is to be done, in one go for many: points that go, and workers that get theirs. */
  #gone: number[] = [];
  readonly #fresh = new Set<number>();

  get length(): number {
    return this.#points.length;
  }

  has(worker: number): boolean {
    return this.#words.has(worker);
  }

  /** `name`: what it is called everywhere; undefined: nothing but its number. One that is there stays as it is. */
  add(worker: number, name: string | undefined): void {
    if (this.has(worker)) return;
    this.#words.set(worker, name === undefined ? [worker + 1, 1] : [hashText(name), hashText(` ${name}`)]);
    this.#fresh.add(worker);
  }

  drop(worker: number): void {
    const words = this.#words.get(worker);
    if (words === undefined) return;
    this.#words.delete(worker);
    if (!this.#fresh.delete(worker)) this.#gone.push(...pointsOf(worker, words));
  }

  /** From now on it is as it was told. */
  settle(): void {
    if (this.#gone.length > 0) this.#points = without(this.#points, Float64Array.from(this.#gone).sort());
    this.#gone = [];
    if (this.#fresh.size === 0) return;
    const fresh = [...this.#fresh].flatMap((worker) => pointsOf(worker, this.#words.get(worker)!));
    this.#points = merged(this.#points, Float64Array.from(fresh).sort());
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

/** In stretches, too. All of `gone` are in `old`. */
function without(old: Float64Array, gone: Float64Array): Float64Array<ArrayBuffer> {
  const left = new Float64Array(old.length - gone.length);
  let from = 0;
  for (let i = 0; i <= gone.length; i++) {
    const to = i < gone.length ? firstFrom(old, gone[i]!, from) : old.length;
    if (to > from) left.set(old.subarray(from, to), from - i);
    from = to + 1;
  }
  return left;
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
