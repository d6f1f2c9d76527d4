/** What a prefix cache holds, as the events that would have told it, for who has not heard them: hashes alone, in no order. */
import type { HashKey } from '@kvtier/identity';
import type { KvCacheEvent } from './events.ts';

/** What an attention group says of itself in each event. */
export interface GroupKind {
  readonly kind: string;
  readonly windowTokens: number | null;
}

/** Blocks of one attention group, and a copy of their hashes; undefined: not one. */
export interface HeldRows extends GroupKind {
  readonly group: number;
  readonly rows: readonly number[];
  readonly keyOf: (row: number) => HashKey | undefined;
}

/** Made in one turn; others' turns come between pages. */
const hashesPerPage = 1_024;

export function* heldEvents(held: readonly HeldRows[]): Generator<readonly KvCacheEvent[]> {
  for (const of of held) {
    for (let at = 0; at < of.rows.length; at += hashesPerPage) {
      const hashes = of.rows.slice(at, at + hashesPerPage).map(of.keyOf);
      yield [
        storedEvent(
          hashes.filter((hash) => hash !== undefined),
          of,
        ),
      ];
    }
  }
}

/** Without a block size: nothing is said of parents and tokens. */
const storedEvent = (blockHashes: readonly HashKey[], { group, kind, windowTokens }: HeldRows): KvCacheEvent => ({
  ...{
    type: 'BlockStored',
    blockHashes,
    parentBlockHash: null,
    tokenIds: [],
    blockSize: 0,
    loraId: null,
    loraName: null,
  },
  ...{ medium: 'GPU', extraKeys: null, groupIdx: group, kvCacheSpecKind: kind, kvCacheSpecSlidingWindow: windowTokens },
});
