/** The coldest entries of a list that may be evicted now. */
import { type EntryLists, none } from './entry-lists.ts';
import type { EntryIndex } from './policy.ts';

/** The coldest one; undefined when none may. `mayEvict` may take those that it has been asked about out of the list. */
export function firstOf(
  lists: EntryLists,
  list: number,
  mayEvict: (entry: EntryIndex) => boolean,
): EntryIndex | undefined {
  for (let entry = lists.coldest(list); entry !== none; ) {
    const next = lists.warmer(entry);
    if (mayEvict(entry)) return entry;
    entry = next;
  }
  return undefined;
}

/** Take the coldest ones out of a list, until there are `count` in `taken`. */
export function takeFirst(
  lists: EntryLists,
  list: number,
  { count, mayEvict, taken }: { count: number; mayEvict: (entry: EntryIndex) => boolean; taken: EntryIndex[] },
): void {
  for (let entry = lists.coldest(list); entry !== none && taken.length < count; ) {
    const next = lists.warmer(entry);
    if (mayEvict(entry)) {
      lists.remove(entry);
      taken.push(entry);
    }
    entry = next;
  }
}
