import { hashKeyOf } from '@kvtier/identity';
import fc from 'fast-check';
import { expect, it } from 'vitest';
import type { StreamItem } from './continuity.ts';
import type { BlockHash, KvEvent } from './event.ts';
import { HolderIndex } from './holder-index.ts';

const item = (events: readonly KvEvent[], rank = 0, topic = 't'): StreamItem => ({
  kind: 'batch',
  seq: 0,
  topic,
  batch: { ts: 1, events, dataParallelRank: rank },
});
const stored = (blockHashes: readonly BlockHash[], medium: string | null = 'GPU', groupIdx = 0): KvEvent => ({
  ...{ type: 'BlockStored', blockHashes, parentBlockHash: null, tokenIds: [], blockSize: 16 },
  ...{ loraId: null, loraName: null, medium, groupIdx },
});
const removed = (blockHashes: readonly BlockHash[], medium: string | null = 'GPU', groupIdx = 0): KvEvent => ({
  ...{ type: 'BlockRemoved', blockHashes, medium, groupIdx },
});
const cleared = (medium: string | null): KvEvent => ({ type: 'AllBlocksCleared', medium });
const gpu = { source: 'a', topic: 't', dataParallelRank: 0, group: 0, medium: 'GPU' };

it('a block that was stored twice is there until it was removed twice', () => {
  const index = new HolderIndex();
  index.apply('a', item([stored([1n, 2n]), stored([1n])]));
  index.apply('a', item([removed([1n, 2n])]));
  expect(index.holdersOf(1n)).toEqual([gpu]);
  expect(index.holdersOf(2n)).toEqual([]);
  index.apply('a', item([removed([1n])]));
  expect(index.holdersOf(1n)).toEqual([]);
  expect(index.stats()).toEqual({ holders: 0, blocks: 0, droppedBlocks: 0, unknownRemovals: 0, forgotten: 0 });
});

it('media, groups, ranks, topics and publishers are told apart; hashes in either form are one', () => {
  const index = new HolderIndex();
  const key = hashKeyOf(Buffer.from(`${'00'.repeat(24)}00000000000000ff`, 'hex'));
  index.apply('a', item([stored([255n], null), stored([key], 'DISK'), stored([255n], 'GPU', 1)]));
  index.apply('a', item([stored([255n])], 1));
  index.apply('a', item([stored([255n])], 0, 't@ns'));
  index.apply('b', item([stored([key])]));
  expect(index.holdersOf(key)).toEqual([
    gpu,
    { ...gpu, medium: 'DISK' },
    { ...gpu, group: 1 },
    { ...gpu, dataParallelRank: 1 },
    { ...gpu, topic: 't@ns' },
    { ...gpu, source: 'b' },
  ]);
  index.apply('a', item([cleared(null)]));
  expect(
    index
      .holdersOf(255n)
      .map(({ source, medium, topic, dataParallelRank }) => [source, medium, topic, dataParallelRank]),
  ).toEqual([
    ['a', 'DISK', 't', 0],
    ['a', 'GPU', 't', 1],
    ['a', 'GPU', 't@ns', 0],
    ['b', 'GPU', 't', 0],
  ]);
  index.apply('a', { kind: 'gap', fromSeq: 1, untilSeq: 2, reason: 'x' });
  expect(index.holdersOf(255n)).toEqual([{ ...gpu, source: 'b' }]);
  index.apply('b', { kind: 'restarted', lastSeq: 9 });
  expect(index.stats()).toMatchObject({ holders: 0, blocks: 0, forgotten: 2 });
});

it('says how much of a chain each holder has', () => {
  const index = new HolderIndex();
  index.apply('a', item([stored([1n, 2n, 4n]), stored([1n, 2n, 3n], 'CPU'), stored([1n], 'GPU', 1)]));
  index.apply('b', item([stored([2n, 3n])]));
  expect(index.matchPrefix([1n, 2n, 3n, 4n])).toEqual([
    { ...gpu, medium: 'CPU', blocks: 3 },
    { ...gpu, blocks: 2 },
  ]);
  expect(index.matchPrefix([1n, 2n], 1)).toEqual([{ ...gpu, group: 1, blocks: 1 }]);
  expect(index.matchPrefix([])).toEqual([]);
});

it('stays within its bound: what was announced first by the largest holder goes', () => {
  const index = new HolderIndex(16);
  index.apply('a', item([stored(Array.from({ length: 15 }, (_, i) => BigInt(i)))]));
  index.apply('b', item([stored([100n, 101n, 102n])]));
  index.checkIntegrity();
  expect(index.stats()).toMatchObject({ blocks: 16, droppedBlocks: 2 });
  expect(index.holdersOf(0n)).toEqual([]);
  expect(index.holdersOf(2n)).toEqual([gpu]);
  expect(index.holdersOf(102n)).toEqual([{ ...gpu, source: 'b' }]);
  index.apply('a', item([removed([0n])]));
  expect(index.stats().unknownRemovals).toBe(1);
});

it('agrees with a plain multiset for any order of events', () => {
  const hash = fc.bigInt({ min: 0n, max: 6n });
  const action = fc.record({
    kind: fc.constantFrom('stored', 'removed', 'cleared'),
    medium: fc.constantFrom('GPU', 'CPU'),
    hashes: fc.array(hash, { maxLength: 4 }),
  });
  fc.assert(
    fc.property(fc.array(action, { maxLength: 40 }), (actions) => {
      const index = new HolderIndex();
      const truth = new Map<string, number>();
      for (const { kind, medium, hashes } of actions) {
        const event =
          kind === 'stored' ? stored(hashes, medium) : kind === 'removed' ? removed(hashes, medium) : cleared(medium);
        index.apply('a', item([event]));
        if (kind === 'cleared') for (const key of truth.keys()) if (key.startsWith(medium)) truth.delete(key);
        for (const one of kind === 'cleared' ? [] : hashes) {
          const key = `${medium} ${one}`;
          truth.set(key, Math.max(0, (truth.get(key) ?? 0) + (kind === 'stored' ? 1 : -1)));
        }
        index.checkIntegrity();
        for (let h = 0n; h <= 6n; h++)
          expect(
            index
              .holdersOf(h)
              .map(({ medium }) => medium)
              .sort(),
          ).toEqual(['CPU', 'GPU'].filter((name) => (truth.get(`${name} ${h}`) ?? 0) > 0));
      }
    }),
  );
});
