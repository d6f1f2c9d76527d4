/** First in, first out: a touch changes nothing. A child goes before its parent, so that chains still shrink from their tail. */
import { invariant } from '@kvtier/errors';
import { EntryLists } from './entry-lists.ts';
import { firstOf } from './first-of.ts';
import type { EntryIndex, EvictionPolicy, InsertHint } from './policy.ts';

export class FifoPolicy implements EvictionPolicy {
  readonly name = 'fifo';
  readonly #lists = new EntryLists('fifo', 1);

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
    invariant(this.has(entry), () => `fifo: entry ${entry} is not tracked`);
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
