/** The coldest entry of a list that may be evicted now; undefined when none may. */
import { type EntryLists, none } from './entry-lists.ts';
import type { EntryIndex } from './policy.ts';

export function firstOf(
  lists: EntryLists,
  list: number,
  mayEvict: (entry: EntryIndex) => boolean,
): EntryIndex | undefined {
  for (let entry = lists.coldest(list); entry !== none; entry = lists.warmer(entry)) {
    if (mayEvict(entry)) return entry;
  }
  return undefined;
}
