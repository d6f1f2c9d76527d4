/** Least recently used: one list; a touch makes its entry the warmest. O(1) but `victim`, which skips what may not go now. */
import { EntryLists } from './entry-lists.ts';
import { firstOf } from './first-of.ts';
import type { EntryIndex, EvictionPolicy, InsertHint } from './policy.ts';

export class LruPolicy implements EvictionPolicy {
  readonly name = 'lru';
  readonly #lists = new EntryLists('lru', 1);

  get count(): number {
    return this.#lists.count;
  }

  has(entry: EntryIndex): boolean {
    return this.#lists.has(entry);
  }

  insert(entry: EntryIndex, _nowUs: number, hint?: InsertHint): void {
    const parent = hint?.parent;
    if (parent !== undefined && this.has(parent)) this.#lists.insertColderThan(parent, entry);
    else this.#lists.append(0, entry);
  }

  touch(entry: EntryIndex, _nowUs: number): void {
    this.#lists.move(0, entry);
  }

  remove(entry: EntryIndex): void {
    this.#lists.remove(entry);
  }

  victim(mayEvict: (entry: EntryIndex) => boolean): EntryIndex | undefined {
    return firstOf(this.#lists, 0, mayEvict);
  }

  coldestFirst(): Iterable<EntryIndex> {
    return this.#lists.entriesOf(0);
  }

  checkIntegrity(): void {
    this.#lists.checkIntegrity();
  }
}
