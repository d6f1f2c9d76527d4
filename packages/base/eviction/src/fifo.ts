/** First in, first out: a touch changes nothing. */
import { invariant } from '@kvtier/errors';
import { OneList } from './one-list.ts';
import type { EntryIndex } from './policy.ts';

export class FifoPolicy extends OneList {
  readonly name = 'fifo';

  constructor() {
    super('fifo');
  }

  touch(entry: EntryIndex, _nowUs: number): void {
    invariant(this.has(entry), () => `fifo: entry ${entry} is not tracked`);
  }
}
