/** What a prefix cache holds, as the events that would have told it, for who has not heard them: hashes alone, in no order. */
import type { HashKey } from '@kvtier/identity';
import type { KvCacheEvent } from './events.ts';

/** Blocks of one attention group, and a copy of their hashes; undefined: not one. */
export interface HeldRows {
  readonly group: number;
  readonly rows: readonly number[];
  readonly keyOf: (row: number) => HashKey | undefined;
}

/** Made in one turn, with others' turns in between. */
const hashesPerPage = 1_024;

export function* heldEvents(held: readonly HeldRows[]): Generator<readonly KvCacheEvent[]> {
  for (const { group, rows, keyOf } of held) {
    for (let at = 0; at < rows.length; at += hashesPerPage) {
      const hashes = rows.slice(at, at + hashesPerPage).map(keyOf);
      yield [
        storedEvent(
          hashes.filter((hash) => hash !== undefined),
          group,
        ),
      ];
    }
  }
}

/** Without a block size: nothing is said of parents and tokens. */
const storedEvent = (blockHashes: readonly HashKey[], groupIdx: number): KvCacheEvent => ({
  ...{
    type: 'BlockStored',
    blockHashes,
    parentBlockHash: null,
    tokenIds: [],
    blockSize: 0,
    loraId: null,
    loraName: null,
  },
  ...{ medium: 'GPU', extraKeys: null, groupIdx, kvCacheSpecKind: '', kvCacheSpecSlidingWindow: null },
});
