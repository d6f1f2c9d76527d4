/**
 * What a pool notes as words is on the wire, byte for byte, what its events would be, with the removals that follow one another in a group
 * as one: native code against the codec of objects.
 */
import { encodeBatch, PackedEncoder } from '@kvtier/events';
import type { HashKey } from '@kvtier/identity';
import { type BlockHashes, EventLog, type KvCacheEvent } from '@kvtier/prefix-cache';
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { prompt, SchedulerRig } from './testing/rig.ts';

const word = fc.oneof(
  fc.nat({ max: 2 ** 32 - 1 }),
  fc.constantFrom(0, 1, 127, 128, 255, 256, 65_535, 65_536, 2 ** 32 - 1),
);
const hashes = (words: readonly number[], wordsPerHash: number): BlockHashes => {
  const packed = Uint32Array.from(words);
  const bytes = Buffer.from(packed.buffer).toString('latin1');
  return {
    blockCount: words.length / wordsPerHash,
    keyAt: (i) => bytes.slice(i * wordsPerHash * 4, (i + 1) * wordsPerHash * 4) as ReturnType<BlockHashes['keyAt']>,
    packedWords: { words: packed, wordsPerHash },
  };
};
const stored = fc.record({
  kind: fc.constant('stored' as const),
  words: fc.array(word, { minLength: 64, maxLength: 64 }),
  places: fc.uniqueArray(fc.nat({ max: 6 }), { maxLength: 7 }).map((places) => places.map((i) => i + 1).sort()),
  hasParent: fc.boolean(),
  tokens: fc.array(word, { maxLength: 70 }),
  blockTokens: fc.constantFrom(1, 16, 128, 70_000),
  group: fc.constantFrom(0, 1, 200),
  attention: fc.constantFrom('full_attention', 'sliding_window', 'mamba', 'an own kind'),
  windowTokens: fc.constantFrom(null, 4, 4096),
});
const removed = fc.record({
  kind: fc.constant('removed' as const),
  words: fc.array(word, { minLength: 8, maxLength: 8 }),
  group: fc.nat({ max: 300 }),
});
const object = fc.record({
  kind: fc.constant('object' as const),
  event: fc.constantFrom<KvCacheEvent>(
    { type: 'AllBlocksCleared' },
    {
      type: 'BlockRemoved',
      blockHashes: [],
      medium: 'GPU',
      groupIdx: 3,
    },
  ),
});
/** Few groups, so that removals follow one another. */
const removals = fc
  .record({
    group: fc.nat({ max: 1 }),
    words: fc.array(fc.array(word, { minLength: 8, maxLength: 8 }), { maxLength: 20 }),
  })
  .map(({ group, words }) => words.map((each) => ({ kind: 'removed' as const, words: each, group })));
const one = fc.oneof(stored, removed, object).map((each) => [each]);
const changes = fc.array(fc.oneof({ weight: 3, arbitrary: one }, removals), { maxLength: 40 }).map((all) => all.flat());

/** The events as one batch tells them: naively. `isNoted`: those that the pool noted itself. */
function merged(events: readonly KvCacheEvent[], isNoted: (index: number) => boolean, most = 1_024): KvCacheEvent[] {
  const out: KvCacheEvent[] = [];
  let last: { blockHashes: HashKey[]; groupIdx: number } | undefined;
  events.forEach((event, index) => {
    if (event.type !== 'BlockRemoved' || !isNoted(index)) {
      last = undefined;
      out.push(event);
    } else if (last && last.groupIdx === event.groupIdx && last.blockHashes.length < most) {
      last.blockHashes.push(...event.blockHashes);
    } else {
      const begun = { ...event, blockHashes: [...event.blockHashes] };
      last = begun;
      out.push(begun);
    }
  });
  return out;
}

function note(
  log: EventLog,
  change: typeof changes extends fc.Arbitrary<(infer T)[]> ? T : never,
  wordsPerHash: number,
) {
  if (change.kind === 'object') log.add(change.event);
  else if (change.kind === 'removed') log.addRemoved(Uint32Array.from(change.words), 0, wordsPerHash, change.group);
  else {
    const { places, hasParent, tokens, group, attention, windowTokens } = change;
    log.addStored({
      hashes: hashes(change.words, wordsPerHash),
      description: { loraId: null, loraName: null, isPlain: true, tokenIds: () => tokens, extraKeys: () => null },
      ...{ first: 0, end: 8, blocks: places, places, parent: hasParent ? 0 : -1 },
      ...{ blockTokens: change.blockTokens, group, kind: attention, windowTokens },
    });
  }
}

it.each([
  ['map', true],
  ['map', false],
  ['array', true],
  ['array', false],
] as const)('%s, integers %s', (encoding, intBlockHashes) => {
  const encoder = new PackedEncoder({ encoding, intBlockHashes });
  fc.assert(
    fc.property(changes, fc.constantFrom(4, 8), fc.constantFrom(null, 0, 7, 200), (all, wordsPerHash, rank) => {
      const [packed, plain] = [new EventLog(true, undefined, intBlockHashes ? 8 : 32), new EventLog(true)];
      for (const change of all) {
        note(packed, change, wordsPerHash);
        note(plain, change, wordsPerHash);
      }
      const events = plain.take();
      expect(events).toHaveLength(all.length);
      const bytes = encoder.encode(packed.takePacked(), 1.5, rank);
      const told = merged(events, (index) => all[index]!.kind === 'removed');
      const wanted = encodeBatch({ ts: 1.5, events: told, dataParallelRank: rank }, { encoding, intBlockHashes });
      expect(bytes.toString('hex')).toBe(wanted.toString('hex'));
    }),
    { numRuns: 150 },
  );
});

it('a log that nobody takes keeps the later half, records and objects alike', () => {
  const log = new EventLog(true, 10);
  for (let i = 0; i < 11; i++) {
    if (i % 3 === 0) log.add({ type: 'BlockRemoved', blockHashes: [], medium: 'GPU', groupIdx: i });
    else log.addRemoved(Uint32Array.of(i, i, i, i), 0, 4, i);
  }
  expect(log.dropped).toBe(5);
  expect(log.take().map((event) => (event.type === 'BlockRemoved' ? event.groupIdx : -1))).toEqual([5, 6, 7, 8, 9, 10]);
  expect(log.take()).toEqual([]);
});

it('the bound counts the blocks that are gone, not their records', () => {
  const log = new EventLog(true, 10);
  const note = (hash: number, group: number): void => log.addRemoved(Uint32Array.of(hash, 0, 0, 0), 0, 4, group);
  const hashesOf = (): number[] =>
    log.take().map((event) => (event.type === 'BlockRemoved' ? event.blockHashes[0]!.charCodeAt(0) : -1));
  for (let i = 0; i < 3; i++) note(i, 0);
  for (let i = 3; i < 11; i++) note(i, 1);
  // The first record has three, the second one seven: both are older than half.
  expect(log.dropped).toBe(10);
  note(11, 1);
  expect(hashesOf()).toEqual([10, 11]);
  note(12, 1);
  expect(hashesOf()).toEqual([12]);
});

it('no removal on the wire names more than 1,024 blocks, and none is lost when the log grows', () => {
  const encoder = new PackedEncoder({});
  const [packed, plain] = [new EventLog(true), new EventLog(true)];
  for (let i = 0; i < 2_500; i++)
    for (const log of [packed, plain]) log.addRemoved(Uint32Array.of(i, i + 1, i + 2, i + 3), 0, 4, 0);
  const events = plain.take();
  expect(events).toHaveLength(2_500);
  const taken = packed.takePacked();
  expect(taken.count).toBe(3);
  const told = merged(events, () => true);
  expect(told.map((event) => (event.type === 'BlockRemoved' ? event.blockHashes.length : 0))).toEqual([
    1_024, 1_024, 452,
  ]);
  const wanted = encodeBatch({ ts: 1.5, events: told, dataParallelRank: null });
  expect(encoder.encode(taken, 1.5, null).equals(wanted)).toBe(true);
});

it('native code refuses words that are no records', () => {
  const encoder = new PackedEncoder({});
  const one = (...words: number[]) => ({ words: Uint32Array.from(words), wordCount: words.length, count: 1 });
  const batches = [
    one(),
    one(1),
    one(1, 8, 0, 4, 1, 2, 3),
    one(1, 5, 0, 1, 9),
    one(2, 10, 0, 4, 1, 0, 16, 0, 0, 0),
    one(9, 2),
    one(0, 2),
  ];
  for (const batch of [...batches, one(2, 10, 0, 4, 2 ** 30, 0, 16, 0, 0, 0), one(2, 10, 0, 4, 0, 0, 16, 0, 0, 5)])
    expect(() => encoder.encode({ ...batch, kinds: ['full_attention'], objects: [] }, 1, null)).toThrow('kv events');
});

it('where a hash is noted in part, no event is made of it', () => {
  const log = new EventLog(true, undefined, 8);
  log.addRemoved(Uint32Array.of(1, 2, 3, 4), 0, 4, 0);
  expect(() => log.take()).toThrow('noted in part');
  const { words, wordCount } = log.takePacked();
  expect([...words.subarray(0, wordCount)]).toEqual([1, 6, 0, 2, 3, 4]);
});

it('an engine says the same in words and in objects', async () => {
  const encoder = new PackedEncoder({});
  const said = await Promise.all(
    ([undefined, 32, 8] as const).map(async (packedHashBytes) => {
      const batches: string[] = [];
      const rig = new SchedulerRig({
        attached: false,
        blockCount: 16,
        ...(packedHashBytes
          ? {
              packedHashBytes,
              onPackedEvents: (packed) => batches.push(encoder.encode(packed, 1, null).toString('hex')),
            }
          : {
              onEvents: (events) =>
                batches.push(
                  encodeBatch({ ts: 1, events: merged(events, () => true), dataParallelRank: null }).toString('hex'),
                ),
            }),
      });
      for (let i = 0; i < 12; i++) await rig.generate(`${i}`, prompt(i % 5, 9 + i));
      return batches;
    }),
  );
  expect(said[0]!.length).toBeGreaterThan(12);
  expect(said.slice(1)).toEqual([said[0], said[0]]);
});
