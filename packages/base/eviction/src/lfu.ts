/**
 * Least frequently used, ties by recency: one list for each number of uses (the frequency lists of Shah, Mitra and Matani's
 * O(1) LFU), counted up to 255.
 *
 * Chains: a use of a block is a use of its ancestors, and owners touch children before parents; so a parent has at least the
 * uses of its children, and at equal numbers it is the warmer one.
 */
import { EntryLists } from './entry-lists.ts';
import { firstOf, takeFirst } from './first-of.ts';
import type { EntryIndex, EvictionPolicy, InsertHint } from './policy.ts';
import { SpareCopies } from './spare-copies.ts';

/** Lists are numbered by uses less one. */
const usesMax = 255;

export class LfuPolicy implements EvictionPolicy {
  readonly name = 'lfu';
  readonly #lists = new EntryLists('lfu', usesMax);
  readonly #copies = new SpareCopies(() => new EntryLists('lfu', usesMax));

  get count(): number {
    return this.#lists.count;
  }

  has(entry: EntryIndex): boolean {
    return this.#lists.has(entry);
  }

  insert(entry: EntryIndex, _nowUs: number, hint?: InsertHint): void {
    const parent = hint?.parent;
    if (parent !== undefined && this.has(parent) && this.#lists.listOf(parent) === 0) {
      this.#lists.insertColderThan(parent, entry);
    } else this.#lists.append(0, entry);
  }

  touch(entry: EntryIndex, _nowUs: number): void {
    this.#lists.move(Math.min(this.#lists.listOf(entry) + 1, usesMax - 1), entry);
  }

  /** The warmest of those that were used as often. */
  refresh(entry: EntryIndex): boolean {
    this.#lists.move(this.#lists.listOf(entry), entry);
    return true;
  }

  remove(entry: EntryIndex): void {
    this.#lists.remove(entry);
  }

  victim(mayEvict: (entry: EntryIndex) => boolean): EntryIndex | undefined {
    for (let list = 0; list < usesMax; list++) {
      const found = firstOf(this.#lists, list, mayEvict);
      if (found !== undefined) return found;
    }
    return undefined;
  }

  evict(count: number, mayEvict: (entry: EntryIndex) => boolean): EntryIndex[] {
    const taken: EntryIndex[] = [];
    for (let list = 0; list < usesMax && taken.length < count; list++) {
      takeFirst(this.#lists, list, { count, mayEvict, taken });
    }
    return taken;
  }

  coldestFirst(): Iterable<EntryIndex> {
    const lists = this.#lists;
    return this.#copies.walk(function* (copy) {
      copy.copyFrom(lists);
      for (let list = 0; list < usesMax; list++) yield* copy.entriesOf(list);
    });
  }

  checkIntegrity(): void {
    this.#lists.checkIntegrity();
  }
}
