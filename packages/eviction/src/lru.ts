/**
 * Least recently used, as a doubly linked list in parallel typed arrays (after node-lru-cache's layout).
 *
 *     head ⇄ entry ⇄ entry ⇄ … ⇄ tail          next → warmer, previous → colder
 *     (coldest)                 (warmest)
 *
 * Invariant: every tracked entry is on the list exactly once. All operations are O(1) but `victim`, which skips entries
 * that may not be evicted now.
 */
import { invariant } from '@kvtier/errors';
import type { EntryIndex, EvictionPolicy, InsertHint } from './policy.ts';

/** Link of an entry at an end of the list. */
const none = -1;
/** Link of an entry that is not tracked. */
const untracked = -2;

export class LruPolicy implements EvictionPolicy {
  readonly name = 'lru';
  #warmer: Int32Array = new Int32Array(64).fill(untracked);
  #colder: Int32Array = new Int32Array(64).fill(untracked);
  #head: EntryIndex = none;
  #tail: EntryIndex = none;
  #count = 0;

  get count(): number {
    return this.#count;
  }

  has(entry: EntryIndex): boolean {
    return entry >= 0 && entry < this.#warmer.length && this.#warmer[entry] !== untracked;
  }

  insert(entry: EntryIndex, _nowUs: number, hint?: InsertHint): void {
    invariant(Number.isInteger(entry) && entry >= 0, () => `lru: ${entry} is not an entry`);
    invariant(!this.has(entry), () => `lru: entry ${entry} is tracked already`);
    this.#reserve(entry);
    const parent = hint?.parent;
    if (parent !== undefined && this.has(parent)) this.#link(entry, this.#colder[parent]!, parent);
    else this.#link(entry, this.#tail, none);
    this.#count++;
  }

  touch(entry: EntryIndex, _nowUs: number): void {
    invariant(this.has(entry), () => `lru: entry ${entry} is not tracked`);
    if (this.#tail === entry) return;
    this.#unlink(entry);
    this.#link(entry, this.#tail, none);
  }

  remove(entry: EntryIndex): void {
    invariant(this.has(entry), () => `lru: entry ${entry} is not tracked`);
    this.#unlink(entry);
    this.#warmer[entry] = untracked;
    this.#colder[entry] = untracked;
    this.#count--;
  }

  victim(mayEvict: (entry: EntryIndex) => boolean): EntryIndex | undefined {
    for (let entry = this.#head; entry !== none; entry = this.#warmer[entry]!) {
      if (mayEvict(entry)) return entry;
    }
    return undefined;
  }

  *coldestFirst(): Iterable<EntryIndex> {
    for (let entry = this.#head; entry !== none; entry = this.#warmer[entry]!) yield entry;
  }

  checkIntegrity(): void {
    let count = 0;
    let colder = none;
    for (let entry = this.#head; entry !== none; entry = this.#warmer[entry]!) {
      invariant(this.#colder[entry] === colder, () => `lru: entry ${entry} does not link back`);
      invariant(++count <= this.#count, 'lru: the list is longer than the count');
      colder = entry;
    }
    invariant(count === this.#count && colder === this.#tail, 'lru: the list ends early');
    const tracked = this.#warmer.reduce((sum, link) => sum + (link === untracked ? 0 : 1), 0);
    invariant(tracked === this.#count, 'lru: an entry is tracked but not on the list');
  }

  /** Put `entry` between two neighbours (or ends) of the list. */
  #link(entry: EntryIndex, colder: EntryIndex, warmer: EntryIndex): void {
    this.#colder[entry] = colder;
    this.#warmer[entry] = warmer;
    if (colder === none) this.#head = entry;
    else this.#warmer[colder] = entry;
    if (warmer === none) this.#tail = entry;
    else this.#colder[warmer] = entry;
  }

  #unlink(entry: EntryIndex): void {
    const colder = this.#colder[entry]!;
    const warmer = this.#warmer[entry]!;
    if (colder === none) this.#head = warmer;
    else this.#warmer[colder] = warmer;
    if (warmer === none) this.#tail = colder;
    else this.#colder[warmer] = colder;
  }

  #reserve(entry: EntryIndex): void {
    if (entry < this.#warmer.length) return;
    const length = Math.max(entry + 1, this.#warmer.length * 2);
    const grow = (links: Int32Array): Int32Array => {
      const grown = new Int32Array(length).fill(untracked);
      grown.set(links);
      return grown;
    };
    this.#warmer = grow(this.#warmer);
    this.#colder = grow(this.#colder);
  }
}
