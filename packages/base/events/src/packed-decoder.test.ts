/** Batches as words against the decoder of objects: for batches of any content, in both encodings, whole and damaged. */
import { readFileSync } from 'node:fs';
import { native } from '@kvtier/data-plane';
import { hashKeyOf } from '@kvtier/identity';
import fc from 'fast-check';
import { describe, expect, it, vi } from 'vitest';
import { decodeBatch, encodeBatch } from './codec.ts';
import { attentionKinds, integerOf, type KvEvent, type KvEventBatch } from './event.ts';
import { type PackedBatch, PackedDecoder, record, recordType } from './packed-decoder.ts';
import { foreignBatch } from './testing/foreign.ts';

/** What a consumer of words sees of an event. */
interface Seen {
  readonly type: KvEvent['type'];
  readonly medium: string | null;
  readonly locality: string | null;
  readonly group: number | null;
  readonly hashes: readonly bigint[];
  readonly parent: bigint | null;
  readonly blockSize: number;
  readonly kind: string | null;
  readonly window: number | null;
  readonly extra: boolean;
  readonly reused: boolean;
  readonly tokens: readonly number[];
}

function seenIn({ words, from, end, names, count, ts, dataParallelRank, unread }: PackedBatch) {
  const hashAt = (at: number): bigint =>
    (BigInt.asUintN(32, BigInt(words[at + 1]!)) << 32n) | BigInt.asUintN(32, BigInt(words[at]!));
  const nameAt = (at: number): string | null => (words[at]! < 0 ? null : names[words[at]!]!);
  const typeOf = {
    [recordType.removed]: 'BlockRemoved',
    [recordType.stored]: 'BlockStored',
    [recordType.cleared]: 'AllBlocksCleared',
    [recordType.reused]: 'BlockStored',
  };
  const events: Seen[] = [];
  let at = from;
  for (; at < end; at += words[at + record.length]!) {
    const [hashes, parents, first] = [words[at + record.hashes]!, words[at + record.parents]!, at + record.head];
    const tokens = first + 2 * (hashes + parents);
    events.push({
      type: typeOf[words[at] as 1 | 2 | 3 | 4] as KvEvent['type'],
      medium: nameAt(at + record.medium),
      locality: nameAt(at + record.locality),
      group: words[at + record.group] === -1 ? null : words[at + record.group]!,
      hashes: Array.from({ length: hashes }, (_, i) => hashAt(first + 2 * i)),
      parent: parents === 0 ? null : hashAt(first + 2 * hashes),
      blockSize: words[at + record.blockSize]!,
      kind: nameAt(at + record.kind),
      window: words[at + record.window] === -1 ? null : words[at + record.window]!,
      extra: words[at + record.extra] === 1,
      reused: words[at] === recordType.reused,
      tokens: Array.from(words.subarray(tokens, at + words[at + record.length]!), (token) => token >>> 0),
    });
  }
  expect(at).toBe(end);
  expect(events.length).toBe(count);
  return { ts, dataParallelRank, events, unread };
}

function expectedOf({ ts, dataParallelRank, events, unread }: KvEventBatch, tokens: boolean) {
  const none = {
    ...{ medium: null, locality: null, group: null, hashes: [], parent: null, blockSize: 0, tokens: [] },
    ...{ kind: null, window: null, extra: false, reused: false },
  };
  const seen = events.map((event): Seen => {
    const { type, medium = null } = event;
    if (event.type === 'AllBlocksCleared') return { ...none, type, medium };
    const common = {
      ...{ ...none, type, medium, locality: event.locality ?? null, group: event.groupIdx ?? null },
      hashes: event.blockHashes.map(integerOf),
    };
    if (event.type === 'BlockRemoved') return common;
    const { parentBlockHash: parent, blockSize, tokenIds } = event;
    return {
      ...{ ...common, parent: parent === null ? null : integerOf(parent), blockSize, tokens: tokens ? tokenIds : [] },
      ...{ kind: event.kvCacheSpecKind ?? null, window: event.kvCacheSpecSlidingWindow ?? null },
      extra: event.loraId !== null || event.loraName !== null || (event.extraKeys ?? []).some((keys) => keys !== null),
      reused: event.reused === true,
    };
  });
  return { ts, dataParallelRank, events: seen, unread };
}

const integerHash = fc.oneof(fc.bigInt({ min: 0n, max: 2n ** 64n - 1n }), fc.bigInt({ min: 0n, max: 300n }));
const hash = fc.oneof(integerHash, fc.uint8Array({ minLength: 16, maxLength: 32 }).map(hashKeyOf));
const number = fc.oneof(fc.nat(200), fc.nat(70_000), fc.nat(2 ** 31 - 1));
const nil = <T>(value: fc.Arbitrary<T>): fc.Arbitrary<T | null> => fc.option(value);
const places = {
  medium: nil(fc.constantFrom('GPU', 'CPU', 'DISK', 'HBM3')),
  locality: nil(fc.constantFrom('LOCAL', 'REMOTE')),
};
const stored = fc.record({
  ...{ type: fc.constant('BlockStored' as const), blockHashes: fc.array(hash), parentBlockHash: nil(hash) },
  tokenIds: fc.array(fc.oneof(number, fc.nat(2 ** 32 - 1))),
  ...{ blockSize: number, loraId: nil(number), loraName: nil(fc.string()), ...places },
  extraKeys: nil(fc.array(nil(fc.array(fc.oneof(fc.string(), number, fc.constant(null)))))),
  ...{ groupIdx: nil(number), kvCacheSpecKind: nil(fc.constantFrom('full_attention', 'mamba')) },
  ...{ kvCacheSpecSlidingWindow: nil(number), reused: nil(fc.constant(true)) },
});
const removed = fc.record({
  type: fc.constant('BlockRemoved' as const),
  blockHashes: fc.array(hash),
  ...places,
  groupIdx: nil(number),
});
const cleared = fc.record({ type: fc.constant('AllBlocksCleared' as const), medium: places.medium });
const batch = fc.record({
  ts: fc.double({ min: 0, max: 1e10, noNaN: true }),
  events: fc.array(fc.oneof(stored, removed, cleared)),
  dataParallelRank: nil(number),
});
const encoding = fc.record({
  encoding: fc.constantFrom('map' as const, 'array' as const),
  intBlockHashes: fc.boolean(),
});

describe('a batch as words', () => {
  it('says what the decoder of objects says, with the ids of tokens or without', () => {
    fc.assert(
      fc.property(fc.array(batch, { maxLength: 4 }), encoding, fc.boolean(), (batches, how, tokens) => {
        const decoder = new PackedDecoder({ tokens });
        const payloads = batches.map((one) => encodeBatch(one, how));
        const packed = payloads.map((payload) => decoder.decode(payload));
        expect(packed.map(seenIn)).toEqual(payloads.map((payload) => expectedOf(decodeBatch(payload), tokens)));
      }),
    );
  });

  it('is read by native code as publishers of today and of before write it', () => {
    const spy = vi.spyOn(native, 'decodeKvEvents');
    const file = new URL('../vectors/kv_events.json', import.meta.url);
    const payloads = [...readFileSync(file, 'utf8').matchAll(/"([0-9a-f]{40,})"/g)].map(([, hex]) =>
      Buffer.from(hex!, 'hex'),
    );
    const batches = payloads.filter((payload) => payload[0] === 0x93);
    expect(batches.length).toBeGreaterThan(5);
    const decoder = new PackedDecoder({ tokens: true });
    for (const payload of batches) decoder.decode(payload); // names that are new
    spy.mockClear();
    for (const payload of batches) {
      expect(seenIn(decoder.decode(payload))).toEqual(expectedOf(decodeBatch(payload), true));
    }
    const byObjects = spy.mock.results.filter(({ value }) => (value as number) < 0).length;
    spy.mockRestore();
    expect(byObjects).toBe(0);
  });

  it('of blocks that were stored again is read by native code, too', () => {
    const event = {
      ...{ type: 'BlockStored' as const, blockHashes: [1n, 2n], parentBlockHash: null, tokenIds: [1, 2], blockSize: 1 },
      ...{ loraId: null, medium: 'GPU', loraName: null, reused: true },
    };
    for (const encoding of ['map', 'array'] as const) {
      const spy = vi.spyOn(native, 'decodeKvEvents');
      const packed = new PackedDecoder().decode(
        encodeBatch({ ts: 1, dataParallelRank: null, events: [event] }, { encoding }),
      );
      expect(spy.mock.results.map(({ value }) => (value as number) > 0)).toEqual([true]);
      spy.mockRestore();
      expect(seenIn(packed).events).toMatchObject([{ reused: true, hashes: [1n, 2n] }]);
    }
  });

  it.each([false, true])(
    'of SGLang with salts, pairs of tokens or none is read by native code (tokens: %s)',
    (tokens) => {
      const payload = foreignBatch([
        ['BlockStored', [7, 8], null, [1, 2], 1, null, 'GPU', { cache_salt: 'tenant', more: [1, 'x', null] }],
        [
          'BlockStored',
          [9],
          8,
          [
            [70_000, 4],
            [4, 5.5],
          ],
          2,
          null,
          'STORAGE',
        ],
        {
          type: 'BlockStored',
          block_hashes: [1],
          parent_block_hash: null,
          token_ids: null,
          block_size: 2,
          medium: 'EXTERNAL',
        },
      ]);
      const spy = vi.spyOn(native, 'decodeKvEvents');
      const packed = new PackedDecoder({ tokens }).decode(payload);
      const results = spy.mock.results.map(({ value }) => (value as number) > 0);
      spy.mockRestore();
      expect(results).toEqual([true]);
      expect(seenIn(packed)).toEqual(expectedOf(decodeBatch(payload), tokens));
      expect(seenIn(packed).events.map(({ extra, tokens }) => [extra, tokens])).toEqual([
        [true, tokens ? [1, 2] : []],
        [false, tokens ? [70_000, 4] : []],
        [false, []],
      ]);
    },
  );

  it('blocks stored that neither reads are passed over, those that no word takes, too', () => {
    const stored = (hash: number, token: unknown, medium = 'GPU'): unknown[] => [
      'BlockStored',
      [hash],
      null,
      [token],
      1,
      null,
      medium,
    ];
    const packed = new PackedDecoder({ tokens: true }).decode(
      foreignBatch([stored(1, 'a'), stored(2, 5), stored(3, 2 ** 40), stored(4, 5, 'x'.repeat(256))]),
    );
    expect(seenIn(packed)).toMatchObject({ events: [{ hashes: [2n], tokens: [5] }], unread: { count: 3 } });
    expect(packed.unread!.reason).toContain('token_ids is not a number');
  });

  it('that only objects can say is read up to a size that takes a short turn', () => {
    const batchOf = (hashes: number, medium: string): Buffer =>
      encodeBatch({
        ...{ ts: 1, dataParallelRank: null },
        events: [{ type: 'BlockRemoved', blockHashes: Array.from({ length: hashes }, () => 1n), medium }],
      });
    const decoder = new PackedDecoder();
    expect(() => decoder.decode(batchOf(32_769, 'new'))).toThrow('a batch of 32769 hashes of another form');
    expect(() => decoder.decode(batchOf(300_000, 'new'))).toThrow(/a batch of 3000\d\d bytes of another form/);
    expect(decoder.decode(batchOf(32_768, 'new')).count).toBe(1);
    expect(decoder.decode(batchOf(300_000, 'new')).count).toBe(1); // its name is known now
  });

  it.each(attentionKinds)(
    'of a publisher whose first one is all that it holds is read whole (%s)',
    (kvCacheSpecKind) => {
      const blocks = 6_000;
      const one: KvEventBatch = {
        ...{ ts: 1, dataParallelRank: 0 },
        events: [
          {
            ...{ type: 'BlockStored', blockHashes: Array.from({ length: blocks }, (_, i) => 2n ** 63n + BigInt(i)) },
            ...{ parentBlockHash: null, tokenIds: Array.from({ length: 16 * blocks }, (_, i) => 70_000 + i) },
            ...{ blockSize: 16, loraId: null, loraName: null, medium: 'GPU', groupIdx: 0, kvCacheSpecKind },
          },
        ],
      };
      const payload = encodeBatch(one);
      expect(payload.length).toBeGreaterThan(256 * 1024);
      expect(seenIn(new PackedDecoder().decode(payload))).toEqual(expectedOf(one, false));
    },
  );

  it('damaged anywhere: refused where the decoder of objects refuses it, and else equal', { timeout: 120_000 }, () => {
    fc.assert(
      fc.property(batch, encoding, fc.nat(), fc.nat(255), fc.nat(3), ({ ...one }, how, place, byte, cut) => {
        const payload = encodeBatch(one, how);
        payload[place % payload.length] = byte;
        const damaged = payload.subarray(0, payload.length - (cut === 3 ? place % payload.length : 0));
        let batchOfObjects: KvEventBatch | undefined;
        try {
          batchOfObjects = decodeBatch(damaged);
        } catch {
          expect(() => new PackedDecoder().decode(damaged)).toThrow(expect.objectContaining({ code: 'PROTOCOL' }));
          return;
        }
        let packed: PackedBatch;
        try {
          packed = new PackedDecoder().decode(damaged);
        } catch (error) {
          expect(error).toMatchObject({ message: expect.stringMatching(/names of media/) });
          return;
        }
        if (/names of media/.test(packed.unread?.reason ?? '')) return;
        expect(seenIn(packed)).toEqual(expectedOf(batchOfObjects, false));
      }),
      { numRuns: 2_000 },
    );
  });

  it.each([
    ['blockSize', 'block_size'],
    ['groupIdx', 'group_idx'],
    ['kvCacheSpecSlidingWindow', 'kv_cache_spec_sliding_window'],
  ])('a %s below zero or beyond 31 bits is passed over, not taken for one that is not said', (field, name) => {
    for (const lie of [-1, -2, 2 ** 31, 2 ** 40]) {
      const stored = {
        ...{ type: 'BlockStored' as const, blockHashes: [1n], parentBlockHash: null, tokenIds: [1], blockSize: 1 },
        ...{ loraId: null, medium: null, loraName: null, [field]: lie },
      };
      const payload = encodeBatch({ ts: 1, dataParallelRank: null, events: [stored] });
      const line = `kv events: ${name} is ${lie}, not a whole number up to 2147483647; does the publisher speak vLLM's encoding?`;
      const unread = { events: [], unread: { count: 1, reason: line } };
      expect(decodeBatch(payload)).toMatchObject(unread);
      expect(seenIn(new PackedDecoder().decode(payload))).toMatchObject(unread);
    }
  });

  it('larger than what is at hand gets room of its own; those before keep their words', () => {
    const decoder = new PackedDecoder();
    const of = (count: number): Buffer => {
      const blockHashes = Array.from({ length: count }, (_, i) => BigInt(count + i));
      return encodeBatch({
        ts: 1,
        dataParallelRank: null,
        events: [{ type: 'BlockRemoved', blockHashes, medium: 'GPU' }],
      });
    };
    const payloads = [1, 200_000, 2, 30_000, 30_000, 3].map(of);
    const packed = payloads.map((payload) => decoder.decode(payload));
    expect(packed.map(seenIn)).toEqual(payloads.map((payload) => expectedOf(decodeBatch(payload), false)));
  });

  it('a publisher that invents names forever is refused, and those known before stay known', () => {
    const decoder = new PackedDecoder();
    const of = (medium: string): Buffer =>
      encodeBatch({ ts: 1, dataParallelRank: null, events: [{ type: 'AllBlocksCleared', medium }] });
    const decode = (medium: string): string | null => seenIn(decoder.decode(of(medium))).events[0]!.medium;
    const known = decoder.batchAt(new Int32Array(6), 0).names.length;
    for (let i = known; i < 64; i++) expect(decode(`M${i}`)).toBe(`M${i}`);
    expect(() => decode('one more')).toThrow(/more than 64 names of media/);
    expect(decode('M63')).toBe('M63');
    expect(() => new PackedDecoder().decode(of('x'.repeat(256)))).toThrow(/more than 255 bytes/);
  });
});
