/** The coldest entry of a list that may be evicted now; undefined when none may. */
import { type EntryLists, none } from './entry-lists.ts';
import type { EntryIndex } from './policy.ts';

/** `mayEvict` may take those that it has been asked about out of the list. */
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
