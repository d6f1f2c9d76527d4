/**
 * A binary heap of entries by rank, the lowest first, equal ones by who came earlier. An entry's place in it is known, so any
 * entry can be removed in O(log n).
 *
 * Invariant: `#places[entry]` is where the entry is in `#heap`, and no entry ranks before the one above it.
 */
import { invariant } from '@kvtier/errors';
import type { EntryIndex } from './policy.ts';
import { copied } from './spare-copies.ts';

const absent = -1;

export class IndexedHeap {
  readonly #heap: EntryIndex[] = [];
  #places: Int32Array = new Int32Array(64).fill(absent);
  readonly #before: (a: EntryIndex, b: EntryIndex) => boolean;

  /** `before`: a strict order of entries that does not change while they are in the heap. */
  constructor(before: (a: EntryIndex, b: EntryIndex) => boolean) {
    this.#before = before;
  }

  get count(): number {
    return this.#heap.length;
  }

  has(entry: EntryIndex): boolean {
    return entry < this.#places.length && this.#places[entry] !== absent;
  }

  first(): EntryIndex | undefined {
    return this.#heap[0];
  }

  /** In no particular order. */
  entries(): readonly EntryIndex[] {
    return this.#heap;
  }

  add(entry: EntryIndex): void {
    if (entry >= this.#places.length) {
      const grown = new Int32Array(Math.max(entry + 1, this.#places.length * 2)).fill(absent);
      grown.set(this.#places);
      this.#places = grown;
    }
    this.#heap.push(entry);
    this.#up(this.#heap.length - 1);
  }

  remove(entry: EntryIndex): void {
    const at = this.#places[entry]!;
    const last = this.#heap.pop()!;
    this.#places[entry] = absent;
    if (last === entry) return;
    this.#heap[at] = last;
    this.#places[last] = at;
    this.#up(at);
    this.#down(this.#places[last]!);
  }

  /** Becomes what the other one is, in the same order. */
  copyFrom(other: IndexedHeap): void {
    this.#heap.length = other.#heap.length;
    for (let at = 0; at < other.#heap.length; at++) this.#heap[at] = other.#heap[at]!;
    this.#places = copied(this.#places, other.#places);
  }

  checkIntegrity(): void {
    this.#heap.forEach((entry, at) => {
      invariant(this.#places[entry] === at, () => `heap: entry ${entry} is not where it should be`);
      const above = this.#heap[(at - 1) >> 1]!;
      invariant(at === 0 || !this.#before(entry, above), () => `heap: entry ${entry} ranks before the one above it`);
    });
  }

  #up(from: number): void {
    let at = from;
    const entry = this.#heap[at]!;
    while (at > 0) {
      const parentAt = (at - 1) >> 1;
      const parent = this.#heap[parentAt]!;
      if (!this.#before(entry, parent)) break;
      this.#put(parent, at);
      at = parentAt;
    }
    this.#put(entry, at);
  }

  #down(from: number): void {
    let at = from;
    const entry = this.#heap[at]!;
    for (;;) {
      let child = 2 * at + 1;
      if (child >= this.#heap.length) break;
      if (child + 1 < this.#heap.length && this.#before(this.#heap[child + 1]!, this.#heap[child]!)) child++;
      if (!this.#before(this.#heap[child]!, entry)) break;
      this.#put(this.#heap[child]!, at);
      at = child;
    }
    this.#put(entry, at);
  }

  #put(entry: EntryIndex, at: number): void {
    this.#heap[at] = entry;
    this.#places[entry] = at;
  }
}
