import { type HashKey, hashKeyOf } from '@kvtier/identity';
import fc from 'fast-check';
import { Packr } from 'msgpackr';
import { expect, it } from 'vitest';
import { decodeBatch, encodeBatch } from './codec.ts';
import type { KvEvent, KvEventBatch } from './event.ts';

const bytes32 = (fill: number): HashKey => hashKeyOf(Buffer.alloc(32, fill));
const hex = (batch: KvEventBatch, options = {}): string => encodeBatch(batch, options).toString('hex');
const removed = (hash: bigint | HashKey, more: object = {}): KvEventBatch => ({
  ts: 1,
  events: [{ type: 'BlockRemoved', blockHashes: [hash], medium: 'GPU', ...more }],
  dataParallelRank: 0,
});
// [1.0, [{"type": "BlockRemoved", "block_hashes": [...
const head = '93cb3ff00000000000009183a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391';

it('a whole second is a float, and a hash an unsigned integer in as few bytes as it needs', () => {
  const tail = 'a66d656469756da347505500';
  expect(hex(removed(2n ** 64n - 1n))).toBe(`${head}cfffffffffffffffff${tail}`);
  expect(hex(removed(2n ** 62n))).toBe(`${head}cf4000000000000000${tail}`);
  expect(hex(removed(2n ** 32n))).toBe(`${head}cf0000000100000000${tail}`);
  expect(hex(removed(2n ** 32n - 1n))).toBe(`${head}ceffffffff${tail}`);
  expect(hex(removed(300n))).toBe(`${head}cd012c${tail}`);
  expect(hex(removed(5n))).toBe(`${head}05${tail}`);
});

it('a hash key travels as its last 8 bytes, or whole', () => {
  expect(hex(removed(bytes32(0xab)))).toBe(hex(removed(0xababababababababn)));
  const small = hashKeyOf(Buffer.from(`${'ee'.repeat(24)}0000000000000012`, 'hex'));
  expect(hex(removed(small))).toBe(hex(removed(0x12n)));
  const whole = encodeBatch(removed(bytes32(0xab)), { intBlockHashes: false });
  expect(decodeBatch(whole).events).toEqual([
    { type: 'BlockRemoved', blockHashes: [bytes32(0xab)], medium: 'GPU', groupIdx: null, locality: null },
  ]);
});

it('a clear names its medium only when it has one', () => {
  const clear = (medium?: string): KvEventBatch => ({
    ts: 1,
    events: [{ type: 'AllBlocksCleared', ...(medium === undefined ? {} : { medium }) }],
    dataParallelRank: null,
  });
  expect(hex(clear())).toBe('93cb3ff00000000000009181a474797065b0416c6c426c6f636b73436c6561726564c0');
  for (const encoding of ['map', 'array'] as const) {
    expect(decodeBatch(encodeBatch(clear('DISK'), { encoding })).events).toEqual(clear('DISK').events);
    expect(decodeBatch(encodeBatch(clear(), { encoding })).events).toEqual([
      { type: 'AllBlocksCleared', medium: null },
    ]);
  }
});

const packr = new Packr({ useRecords: false });
const batchOf = (...events: unknown[]): Buffer => packr.pack([1.5, events, 0]);

it('reads what older and newer publishers send', () => {
  // Before `medium`: six fields after the tag at most. Newer: fields and events that nobody knows yet.
  expect(decodeBatch(batchOf(['BlockStored', [7n], null, [1, 2], 2, null])).events).toMatchObject([
    { blockHashes: [7n], blockSize: 2, medium: null, loraName: null, extraKeys: null, groupIdx: null },
  ]);
  expect(decodeBatch(batchOf(['BlockRemoved', [7]], ['AllBlocksCleared'], ['Renamed', 1])).events).toMatchObject([
    { type: 'BlockRemoved', blockHashes: [7n], medium: null },
    { type: 'AllBlocksCleared' },
  ]);
  const later = { type: 'BlockRemoved', block_hashes: [7], medium: 'CPU', colour: 'red' };
  expect(decodeBatch(batchOf(later, { type: 'toString' })).events).toEqual([
    { type: 'BlockRemoved', blockHashes: [7n], medium: 'CPU', groupIdx: null, locality: null },
  ]);
  expect(decodeBatch(packr.pack([1.5, []])).dataParallelRank).toBeNull();
  // Signed, as some publishers have it: the same 64 bits.
  expect(decodeBatch(batchOf(['BlockRemoved', [-1]])).events[0]).toMatchObject({ blockHashes: [2n ** 64n - 1n] });
});

it.each([
  ['not msgpack', Buffer.from('c1', 'hex')],
  ['nothing', Buffer.alloc(0)],
  ['cut off', batchOf(['AllBlocksCleared']).subarray(0, 20)],
  ['a map', packr.pack({ ts: 1 })],
  ['no time', packr.pack(['now', [], 0])],
  ['an event without a type', batchOf({ block_hashes: [1] })],
  ['an event that is a number', batchOf(5)],
  ['a hash of text', batchOf(['BlockRemoved', ['x'], 'GPU'])],
  ['a hash of 4 bytes', batchOf(['BlockRemoved', [Buffer.alloc(4)], 'GPU'])],
  ['no hashes', batchOf(['BlockRemoved'])],
  ['a medium that is a number', batchOf(['BlockRemoved', [1], 1])],
])('refuses with PROTOCOL: %s', (_, payload) => {
  expect(() => decodeBatch(payload)).toThrow(expect.objectContaining({ code: 'PROTOCOL' }));
});

it.each([
  ['no block size', ['BlockStored', [2], null, [1]], 'block_size is not a number'],
  ['tokens of text', ['BlockStored', [2], null, ['a'], 1, null], 'token_ids is not a number'],
  ['tokens by three', ['BlockStored', [2], null, [[1, 2, 3]], 1, null], 'token_ids is not a number'],
  ['a pair of text', ['BlockStored', [2], null, [[1, 'b']], 1, null], 'token_ids is not a number'],
  ['a hash of text', { type: 'BlockStored', block_hashes: ['x'] }, 'block_hashes: a hash is an integer'],
  [
    'hashes beside a salt that are none',
    ['BlockStored', 5, null, [1], 1, null, 'GPU', { cache_salt: 'a' }],
    'block_hashes is not',
  ],
])('passes over blocks stored that it cannot read, and says so: %s', (_, bad, reason) => {
  const good = ['BlockStored', [1], null, [1], 1, null, 'GPU'];
  const { events, unread } = decodeBatch(batchOf(bad, good, bad, ['BlockRemoved', [3], 'GPU']));
  expect(events).toMatchObject([{ blockHashes: [1n] }, { type: 'BlockRemoved', blockHashes: [3n] }]);
  expect(unread).toEqual({ count: 2, reason: expect.stringContaining(reason) });
  // What is gone and is not known to be would be claimed for ever.
  const removals = batchOf(bad, ['BlockRemoved', ['x'], 'GPU']);
  expect(() => decodeBatch(removals)).toThrow(expect.objectContaining({ code: 'PROTOCOL' }));
});

it("reads SGLang's salt beside the hashes as an extra key of each, and pairs of tokens as the first ones", () => {
  const salted = ['BlockStored', [7, 8], null, [1, 2], 1, null, 'GPU', { cache_salt: 'tenant' }];
  const pairs = [
    'BlockStored',
    [9],
    8,
    [
      [3, 4],
      [4, 5],
    ],
    2,
    null,
    'CPU_PINNED',
  ];
  const { events, unread } = decodeBatch(batchOf(salted, pairs));
  expect(unread).toBeUndefined();
  expect(events).toMatchObject([
    { blockHashes: [7n, 8n], tokenIds: [1, 2], loraName: null, extraKeys: [['tenant'], ['tenant']] },
    { blockHashes: [9n], tokenIds: [3, 4], extraKeys: null },
  ]);
});

it('tokens that are null are none', () => {
  const stored = { type: 'BlockStored', block_hashes: [1], parent_block_hash: null, token_ids: null, block_size: 16 };
  expect(decodeBatch(batchOf(stored)).events).toMatchObject([{ blockHashes: [1n], tokenIds: [] }]);
});

it('an extra key that cannot be written is refused, and the next batch is whole', () => {
  const stored = {
    type: 'BlockStored',
    blockHashes: [1n],
    parentBlockHash: null,
    tokenIds: [1],
    blockSize: 1,
  } as const;
  const bad: KvEvent = { ...stored, loraId: null, medium: 'GPU', loraName: null, extraKeys: [[() => 1]] };
  expect(() => encodeBatch({ ts: 1, events: [bad], dataParallelRank: 0 })).toThrow(
    expect.objectContaining({ code: 'PROTOCOL' }),
  );
  expect(decodeBatch(encodeBatch(removed(5n))).events).toHaveLength(1);
});

const nullable = <T>(arbitrary: fc.Arbitrary<T>): fc.Arbitrary<T | null> => fc.option(arbitrary, { nil: null });
const hash = fc.oneof(
  fc.bigInt({ min: 0n, max: 2n ** 64n - 1n }),
  fc.uint8Array({ minLength: 32, maxLength: 32 }).map(hashKeyOf),
);
const count = fc.nat(2 ** 31 - 1);
const extraKey = fc.oneof(
  fc.string({ maxLength: 300, unit: 'binary' }),
  fc.maxSafeInteger(),
  fc.tuple(fc.string(), fc.integer()),
);
const medium = nullable(
  fc.constantFrom('GPU', 'CPU', 'DISK', 'REDIS', 'S3', 'a name of more than thirty-one characters'),
);
const event: fc.Arbitrary<KvEvent> = fc.oneof(
  fc.record({
    type: fc.constant('BlockStored' as const),
    blockHashes: fc.array(hash, { maxLength: 40 }),
    parentBlockHash: nullable(hash),
    tokenIds: fc.array(fc.nat(2 ** 32 - 1), { maxLength: 70 }),
    blockSize: count,
    loraId: nullable(fc.integer()),
    medium,
    loraName: nullable(fc.string({ unit: 'grapheme' })),
    extraKeys: nullable(fc.array(nullable(fc.array(extraKey)), { maxLength: 20 })),
    groupIdx: nullable(count),
    kvCacheSpecKind: nullable(fc.string()),
    kvCacheSpecSlidingWindow: nullable(count),
    locality: fc.constant(null),
  }),
  fc.record({
    type: fc.constant('BlockRemoved' as const),
    blockHashes: fc.array(hash),
    medium,
    groupIdx: nullable(count),
    locality: fc.constant(null),
  }),
  fc.record({ type: fc.constant('AllBlocksCleared' as const), medium: fc.constantFrom(null, 'CPU') }),
);

it('whatever is written is read again, in both encodings', () => {
  fc.assert(
    fc.property(fc.array(event, { maxLength: 20 }), fc.double({ noNaN: true }), nullable(count), (events, ts, rank) => {
      const batch = { ts, events, dataParallelRank: rank };
      for (const encoding of ['map', 'array'] as const)
        expect(decodeBatch(encodeBatch(batch, { encoding, intBlockHashes: false }))).toEqual({
          ...batch,
          events: events.map((one) =>
            one.type === 'BlockStored' && one.extraKeys ? { ...one, extraKeys: bigIntegers(one.extraKeys) } : one,
          ),
        });
    }),
    { numRuns: 300 },
  );
});

/** Integers of more than 32 bits come back as bigint. */
function bigIntegers(value: unknown): never {
  if (Array.isArray(value)) return value.map(bigIntegers) as never;
  const isBig = typeof value === 'number' && (value >= 2 ** 32 || value < -(2 ** 31));
  return (isBig ? BigInt(value) : value) as never;
}
