/**
 * Least recently used: one list, the coldest first; a touch makes its entry the warmest. A child stands before its parent, so that chains
 * shrink from their tail. O(1) but `victim` and `evict`, which skip what may not go now.
 */
import { EntryLists } from './entry-lists.ts';
import { firstOf, takeFirst } from './first-of.ts';
import type { EntryIndex, EvictionPolicy, InsertHint } from './policy.ts';
import { SpareCopies } from './spare-copies.ts';

export class LruPolicy implements EvictionPolicy {
  readonly name = 'lru';
  readonly #list = new EntryLists('lru', 1);
  readonly #copies = new SpareCopies(() => new EntryLists('lru', 1));

  get count(): number {
    return this.#list.count;
  }

  has(entry: EntryIndex): boolean {
    return this.#list.has(entry);
  }

  insert(entry: EntryIndex, _nowUs: number, hint?: InsertHint): void {
    const parent = hint?.parent;
    if (parent !== undefined && this.has(parent)) this.#list.insertColderThan(parent, entry);
    else this.#list.append(0, entry);
  }

  touch(entry: EntryIndex, _nowUs: number): void {
    this.#list.move(0, entry);
  }

  refresh(entry: EntryIndex): boolean {
    this.#list.move(0, entry);
    return true;
  }

  remove(entry: EntryIndex): void {
    this.#list.remove(entry);
  }

  victim(mayEvict: (entry: EntryIndex) => boolean): EntryIndex | undefined {
    return firstOf(this.#list, 0, mayEvict);
  }

  evict(count: number, mayEvict: (entry: EntryIndex) => boolean): EntryIndex[] {
    const taken: EntryIndex[] = [];
    takeFirst(this.#list, 0, { count, mayEvict, taken });
    return taken;
  }

  coldestFirst(): Iterable<EntryIndex> {
    return this.#copies.walk((copy) => {
      copy.copyFrom(this.#list);
      return copy.entriesOf(0);
    });
  }

  checkIntegrity(): void {
    this.#list.checkIntegrity();
  }
}
