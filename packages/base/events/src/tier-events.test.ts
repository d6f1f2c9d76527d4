import { hashKeyOf, namespaceFromDigest } from '@kvtier/identity';
import { expect, it } from 'vitest';
import { decodeBatch, encodeBatch } from './codec.ts';
import type { KvEvent } from './event.ts';
import { NaiveHolders } from './testing/naive-holders.ts';
import { type TierChange, tierEvents } from './tier-events.ts';

const namespaces = [1, 2].map((fill) => namespaceFromDigest(Buffer.alloc(32, fill)));
const key = (i: number) => {
  const hash = Buffer.alloc(32, 7);
  hash.writeUInt32BE(i, 28);
  return hashKeyOf(hash);
};
const keys = (count: number) => Array.from({ length: count }, (_, i) => key(i));

it('the index of a router holds what a tier holds, by namespace and medium', () => {
  const index = new NaiveHolders();
  const sent: KvEvent[] = [];
  const publish = (events: readonly KvEvent[], subtopic: string): void => {
    sent.push(...events);
    const batch = decodeBatch(encodeBatch({ ts: 0, events, dataParallelRank: null }));
    index.apply('node', { kind: 'batch', seq: 0, topic: `kv${subtopic}`, batch });
  };
  const [disk, arena] = ['disk', 'arena'].map((tier) => tierEvents({ tier, blockTokens: () => 16, publish }));
  const change = (kind: 'stored' | 'removed', which: number, hashes = keys(2)): TierChange => ({
    kind,
    namespace: namespaces[which]!,
    hashes,
  });
  const where = (): string[] => index.holdersOf(key(1));

  disk!(change('stored', 0, keys(10_000)));
  expect(sent.map((event) => event.type === 'BlockStored' && event.blockHashes.length)).toEqual([4_096, 4_096, 1_808]);
  expect(sent[0]).toMatchObject({ medium: 'DISK', locality: 'LOCAL', blockSize: 16, tokenIds: [] });
  arena!(change('stored', 0));
  disk!(change('stored', 1));
  const [first, second] = ['node kv@0101010101010101 - 0', 'node kv@0202020202020202 - 0'];
  expect(where()).toEqual([`${first} DISK`, `${first} CPU`, `${second} DISK`]);
  arena!(change('removed', 0));
  expect(where()).toEqual([`${first} DISK`, `${second} DISK`]);
  disk!({ kind: 'cleared', namespace: null, hashes: [] });
  expect([index.blocks, index.unknownRemovals]).toEqual([0, 0]);
});
