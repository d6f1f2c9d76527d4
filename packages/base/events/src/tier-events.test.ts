import { hashKeyOf, namespaceFromDigest } from '@kvtier/identity';
import { expect, it } from 'vitest';
import { decodeBatch, encodeBatch } from './codec.ts';
import { integerOf, type KvEvent } from './event.ts';
import { NaiveHolders } from './testing/naive-holders.ts';
import { type TierChange, tierEvents } from './tier-events.ts';

const namespaces = [1, 2].map((fill) => namespaceFromDigest(Buffer.alloc(32, fill)));
const key = (i: number) => {
  const hash = Buffer.alloc(32, 7);
  hash.writeUInt32BE(i, 28);
  return hashKeyOf(hash);
};
const keys = (count: number) => Array.from({ length: count }, (_, i) => key(i));

it('blocks with tokens describe themselves: those that follow each other in one event, with size and parent', () => {
  const tokensOf = new Map(
    [1, 2, 3, 5, 6].map((i) => [key(i), { parent: i === 1 ? null : key(i - 1), tokenIds: [i, 70_000] }]),
  );
  const batches: KvEvent[][] = [];
  const tell = tierEvents({
    tier: 'arena',
    blockTokens: () => 2,
    tokens: ({ key: of }, hash) => (of === namespaces[0]!.key ? tokensOf.get(hash) : undefined),
    publish: (events) => batches.push([...events]),
  });
  const shape = (): unknown[] =>
    batches.splice(0).flatMap((events) =>
      events.map((event) => {
        if (event.type !== 'BlockStored') return event.type;
        const { blockHashes, parentBlockHash, tokenIds, blockSize } = event;
        return [blockHashes.map((hash) => keys(9).indexOf(hash as never)), parentBlockHash, [...tokenIds], blockSize];
      }),
    );
  tell({ kind: 'stored', namespace: namespaces[0]!, hashes: [1, 2, 3, 4, 5, 6, 2, 7, 8].map(key) });
  expect(shape()).toEqual([
    [[1, 2, 3], null, [1, 70_000, 2, 70_000, 3, 70_000], 2],
    [[4], null, [], 2],
    [[5, 6], key(4), [5, 70_000, 6, 70_000], 2],
    [[2], key(1), [2, 70_000], 2],
    [[7, 8], null, [], 2],
  ]);
  tell({ kind: 'stored', namespace: namespaces[1]!, hashes: [key(1)] });
  tell({ kind: 'removed', namespace: namespaces[0]!, hashes: [key(1)] });
  expect(shape()).toEqual([[[1], null, [], 2], 'BlockRemoved']);
  // Tokens of another block size are none of this namespace's.
  tokensOf.set(key(1), { parent: null, tokenIds: [1, 2, 3] });
  tell({ kind: 'stored', namespace: namespaces[0]!, hashes: [key(1)] });
  expect(shape()).toEqual([[[1], null, [], 2]]);
});

it('a self-describing event on the wire: pinned', () => {
  const payloads: string[] = [];
  const tell = tierEvents({
    tier: 'disk',
    blockTokens: () => 2,
    tokens: (_, hash) => ({ parent: hash === key(1) ? key(0) : key(1), tokenIds: [5, 300] }),
    publish: (events) => {
      for (const encoding of ['map', 'array'] as const)
        payloads.push(encodeBatch({ ts: 0, events, dataParallelRank: null }, { encoding }).toString('hex'));
    },
  });
  tell({ kind: 'stored', namespace: namespaces[0]!, hashes: [key(1), key(2)] });
  const hashes = '92cf0707070700000001cf0707070700000002';
  const text = (word: string): string => Buffer.from([0xa0 + word.length, ...Buffer.from(word)]).toString('hex');
  const [tokens, none] = ['9405cd012c05cd012c', 'c0'];
  const fields: readonly (readonly [string, string])[] = [
    ['type', text('BlockStored')],
    ['block_hashes', hashes],
    ['parent_block_hash', 'cf0707070700000000'],
    ['token_ids', tokens],
    ['block_size', '02'],
    ['lora_id', none],
    ['medium', text('DISK')],
    ['lora_name', none],
    ['locality', text('LOCAL')],
  ];
  const ts = '93cb0000000000000000';
  expect(payloads).toEqual([
    `${ts}9189${fields.map(([name, value]) => text(name) + value).join('')}c0`,
    `${ts}919c${fields
      .slice(0, 8)
      .map(([, value]) => value)
      .join('')}${none.repeat(4)}c0`,
  ]);
  const [map] = payloads.map((payload) => decodeBatch(Buffer.from(payload, 'hex')).events[0]);
  expect(map).toMatchObject({
    tokenIds: [5, 300, 5, 300],
    blockSize: 2,
    medium: 'DISK',
    parentBlockHash: integerOf(key(0)),
  });
});

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
