/** What policies share whose entries stand in one list, the coldest first: a child stands before its parent, so that chains shrink from their tail. */
import { EntryLists } from './entry-lists.ts';
import { firstOf } from './first-of.ts';
import type { EntryIndex, EvictionPolicy, InsertHint } from './policy.ts';

export abstract class OneList implements EvictionPolicy {
  abstract readonly name: EvictionPolicy['name'];
  protected readonly lists: EntryLists;

  constructor(name: EvictionPolicy['name']) {
    this.lists = new EntryLists(name, 1);
  }

  abstract touch(entry: EntryIndex, nowUs: number): void;

  get count(): number {
    return this.lists.count;
  }

  has(entry: EntryIndex): boolean {
    return this.lists.has(entry);
  }

  insert(entry: EntryIndex, _nowUs: number, hint?: InsertHint): void {
    const parent = hint?.parent;
    if (parent !== undefined && this.has(parent)) this.lists.insertColderThan(parent, entry);
    else this.lists.append(0, entry);
  }

  remove(entry: EntryIndex): void {
    this.lists.remove(entry);
  }

  victim(mayEvict: (entry: EntryIndex) => boolean): EntryIndex | undefined {
    return firstOf(this.lists, 0, mayEvict);
  }

  coldestFirst(): Iterable<EntryIndex> {
    return this.lists.entriesOf(0);
  }

  checkIntegrity(): void {
    this.lists.checkIntegrity();
  }
}
