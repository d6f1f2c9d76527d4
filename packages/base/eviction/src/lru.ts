/** Least recently used: one list; a touch makes its entry the warmest. O(1) but `victim`, which skips what may not go now. */
import { OneList } from './one-list.ts';
import type { EntryIndex } from './policy.ts';

export class LruPolicy extends OneList {
  readonly name = 'lru';

  constructor() {
    super('lru');
  }

  touch(entry: EntryIndex, _nowUs: number): void {
    this.lists.move(0, entry);
  }
}
