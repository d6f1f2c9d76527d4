/** Nodes beside engines that name blocks otherwise than we do: what of theirs a prompt finds, whatever they tell in which order. */
import { encodeBatch, type KvEvent, PackedDecoder } from '@kvtier/events';
import { ChainHasher } from '@kvtier/identity';
import * as fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { keysOfHashes } from '../keys.ts';
import { KvIndex } from '../kv-index.ts';
import { LieCounts, Lies } from './lies.ts';
import { mediumNumbers } from './media.ts';
import { NamesBudget } from './names-budget.ts';
import { NodeListing } from './node-listing.ts';
import { SharedBlocks } from './shared-blocks.ts';
import { WaitingRuns } from './waiting-runs.ts';

const blockTokens = 4;
const length = 8;
const hasher = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens });
/** As an engine with another root has them. */
const theirs = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens, rootSeed: 'another' });

/** Of so many blocks; prompts of one seed begin alike. */
function promptOf(seed: number, blocks = length) {
  const tokens = Array.from({ length: blocks * blockTokens }, (_, i) => 1_000 * seed + i);
  const packed = theirs.hashBlocks(null, Uint32Array.from(tokens));
  const bytes = theirs.hashBytes;
  const hashes = Array.from({ length: blocks }, (_, i) => packed.readBigUInt64BE((i + 1) * bytes - 8));
  return { tokens, hashes, keys: keysOfHashes(hasher.hashBlocks(null, Uint32Array.from(tokens)), hasher.hashBytes) };
}
const prompts = [1, 2].map((seed) => promptOf(seed));
type Prompt = ReturnType<typeof promptOf>;

const [first, second] = ['0000000000000001', '0000000000000002'] as const;
const local = { blockSize: blockTokens, loraId: null, loraName: null };
const described = ({ hashes, tokens }: Prompt, from = 0, to = length, medium = 'CPU'): KvEvent => ({
  ...{ type: 'BlockStored', blockHashes: hashes.slice(from, to), medium, ...local },
  parentBlockHash: from === 0 ? null : hashes[from - 1]!,
  tokenIds: tokens.slice(from * blockTokens, to * blockTokens),
});
const bare = ({ hashes }: Prompt, from = 0, to = length, medium = 'DISK'): KvEvent => ({
  ...{ type: 'BlockStored', blockHashes: hashes.slice(from, to), medium, ...local },
  ...{ parentBlockHash: null, tokenIds: [] },
});
const removed = ({ hashes }: Prompt, from = 0, to = length, medium = 'CPU'): KvEvent => ({
  ...{ type: 'BlockRemoved', blockHashes: hashes.slice(from, to), medium },
});

function rig({ namesBytes = 1 << 20, maxBlocks = 1e5 } = {}) {
  const index = new KvIndex({ maxBytes: 1 << 22, countedMedia: 1 << mediumNumbers.gpu });
  const counts = new LieCounts();
  const lines: string[] = [];
  const log = { info: () => undefined, warn: (_: object, message: string) => void lines.push(message) };
  const lies = new Lies('cache node n', counts, log, () => 0);
  const shared = new SharedBlocks(index, 1e6, () => undefined);
  const budget = new NamesBudget(namesBytes);
  const teller = { resync: () => undefined };
  const told = { unnamed: 0, leftOut: 0 };
  const listing = new NodeListing({
    ...{ index, blockTokens, maxBlocks, shared, teller, lies, renaming: { hasher, budget } },
    onUnnamed: (blocks) => {
      told.unnamed += blocks;
    },
    onLeftOut: (blocks) => {
      told.leftOut += blocks;
    },
  });
  const decoder = new PackedDecoder({ tokens: true });
  const say = (events: readonly KvEvent[], namespace: string = first, ts = 1): void => {
    const batch = decoder.decode(encodeBatch({ ts, events, dataParallelRank: null }));
    for (const _ of listing.apply({ kind: 'batch', seq: 0, topic: `kv@${namespace}`, batch }));
  };
  const begins = (kind: 'snapshot' | 'restarted' = 'snapshot'): void => {
    const item = kind === 'snapshot' ? ({ kind, seq: 0 } as const) : ({ kind, lastSeq: 0 } as const);
    for (const _ of listing.apply(item));
  };
  /** What an engine beside it can load of a prompt. */
  const held = ({ keys }: Prompt): number => {
    const targets = listing.namespaces.map((namespace) => ({
      sources: [listing.partOf(namespace) ?? [], shared.partsOf(teller, namespace)].flat().map(({ source }) => source),
    }));
    return Math.min(...index.match(keys, targets).map(({ blocks }) => blocks), targets.length === 0 ? 0 : length);
  };
  return { index, listing, budget, say, begins, held, told, lies: counts.byKind, lines };
}

const [prompt, other] = prompts as [Prompt, Prompt];

describe('what a node beside an engine of other names holds', () => {
  it('is found by a prompt where its tokens are told, in memory, on disk and in shared tiers', () => {
    const { say, held, told, lies, listing } = rig();
    say([described(prompt, 0, 4), described(prompt, 4, 6), bare(prompt, 2, 7), described(prompt, 7, 8, 'REDIS')]);
    // The seventh block was told of as a hash, before anybody knew its tokens; and so the eighth follows one without a name.
    expect([held(prompt), held(other), told.unnamed]).toEqual([6, 0, 2]);
    say([described(prompt, 6, 7)]);
    expect(held(prompt)).toBe(8);
    say([removed(prompt, 0, 6)]);
    expect(held(prompt)).toBe(0);
    say([described(prompt, 0, 2)]);
    expect(held(prompt)).toBe(8); // the rest is on disk
    expect([Object.values(lies).every((count) => count === 0), listing.problem]).toEqual([true, undefined]);
  });

  it('whose tokens nobody knows is credited with nothing, counted, and it says why', () => {
    const { say, held, told, listing, index } = rig();
    say([bare(prompt, 0, 8, 'CPU'), bare(other)]);
    expect([held(prompt), told.unnamed, listing.namespaces, index.stats().blocks]).toEqual([0, 16, [], 0]);
    expect(listing.problem?.what).toBe('none of its blocks can be named, as it tells no tokens of them');
    say([described(other, 0, 3)]);
    expect([held(other), listing.problem]).toEqual([3, undefined]);
  });

  it('and starts again is credited with what its disk still has, by the names of before', () => {
    const { say, begins, held, told } = rig();
    say([described(prompt), bare(prompt, 0, 5)]);
    begins('restarted');
    expect(held(prompt)).toBe(0);
    begins();
    say([bare(prompt, 0, 5)]);
    expect([held(prompt), told.unnamed]).toEqual([5, 0]);
    say([removed(prompt, 3, 5, 'DISK')]);
    expect(held(prompt)).toBe(3);
  });

  it('and tells tier by tier is credited with all, whatever comes before what it follows', () => {
    const { say, begins, held } = rig();
    begins();
    say([described(prompt, 5, 8), described(prompt, 2, 5)]);
    expect(held(prompt)).toBe(0);
    say([removed(prompt, 6, 7)]);
    say([described(prompt, 0, 2, 'DISK')]);
    expect(held(prompt)).toBe(6);
    say([described(prompt, 6, 7, 'DISK'), described(other, 3, 8)]);
    expect([held(prompt), held(other)]).toEqual([8, 0]);
    say([{ type: 'AllBlocksCleared', medium: 'CPU' }]);
    say([described(other, 0, 3)]);
    expect([held(prompt), held(other)]).toEqual([2, 3]);
  });

  it('for several ranks is at hand where each has its part; groups with a window, and engines of before, do not count', () => {
    const { say, held, listing } = rig();
    for (const namespace of [first, second]) say([described(prompt)], namespace);
    say([bare(prompt, 6, 8, 'CPU')], '0000000000000003');
    expect([held(prompt), listing.namespaces]).toEqual([8, [first, second]]);
    say([removed(prompt, 4, 8)], second);
    expect(held(prompt)).toBe(4);
    say([described(other)], first, 100);
    expect([held(prompt), listing.namespaces]).toEqual([8, [first]]);
    // What is written down meanwhile is no sign of life.
    say([described(other, 0, 8, 'DISK')], second, 101);
    expect(listing.namespaces).toEqual([first]);
    say([described(other)], second, 101);
    expect([held(prompt), held(other)]).toEqual([4, 8]);
  });

  it('has names while there is room for them; those of no use make room, and all is given back in the end', () => {
    const { say, begins, held, told, lies, lines, budget, listing } = rig({ maxBlocks: 20 });
    const many = Array.from({ length: 5 }, (_, i) => promptOf(10 + i));
    for (const one of many) say([described(one)]);
    expect(many.map(held)).toEqual([8, 8, 0, 0, 0]);
    expect([told.leftOut, lies.no_room, budget.bytes > 0]).toEqual([24, 3, true]);
    expect(lines).toEqual([
      "KV events of cache node n: no room to name them, 16 blocks have one; raise the coordinator's index.maxBytes; ignored",
    ]);
    say([removed(many[0]!), described(many[4]!)]);
    expect(many.map(held)).toEqual([0, 8, 0, 0, 8]);
    begins();
    say([described(many[2]!), described(many[3]!)]);
    expect(many.map(held)).toEqual([0, 0, 8, 8, 0]);
    listing.forget();
    expect([many.map(held), budget.bytes]).toEqual([[0, 0, 0, 0, 0], 0]);
  });

  it('cannot make what waits for its parent take more than its room', () => {
    const { say, held, budget } = rig({ namesBytes: 1 << 17 });
    for (let i = 0; i < 2_000; i++) say([described(promptOf(100 + i), 4, 8)]);
    expect(budget.bytes).toBeLessThanOrEqual(1 << 17);
    say([{ type: 'AllBlocksCleared', medium: 'CPU' }]);
    expect(budget.bytes).toBe(0);
    say([described(prompt)]);
    expect(held(prompt)).toBe(8);
  });
});

it('of blocks that wait for the one before them, the oldest go first', () => {
  const budget = new NamesBudget(1 << 20);
  const waiting = new WaitingRuns(budget, 8);
  const place = { namespace: first, medium: mediumNumbers.cpu };
  const runs = [1, 2, 3].map((seed) => promptOf(seed).keys);
  for (const keys of runs) {
    const words = new Int32Array(4 * blockTokens);
    expect(waiting.hold(place, keys.subarray(2, 10), words, keys.subarray(0, 2))).toBe(true);
  }
  expect(waiting.hold(place, runs[0]!.subarray(0), new Int32Array(0), runs[1]!)).toBe(true);
  expect(runs.map((keys) => waiting.take(keys, 0).length)).toEqual([0, 1, 0]);
  expect(waiting.hold(place, promptOf(4, 9).keys, new Int32Array(0), runs[0]!)).toBe(false);
  expect([waiting.isEmpty, budget.bytes]).toEqual([true, 0]);
});

const step = fc.record({
  kind: fc.constantFrom('store', 'store', 'bare', 'remove', 'clear', 'snapshot', 'restart'),
  ...{ chain: fc.nat(1), from: fc.nat(length - 1), blocks: fc.integer({ min: 1, max: length }) },
  ...{ medium: fc.constantFrom('CPU', 'DISK'), namespace: fc.constantFrom(first, second) },
  order: fc.array(fc.nat(1_000), { minLength: 64, maxLength: 64 }),
});

it('never more than it holds, and after a snapshot with tokens, in whatever order, all that each rank does', () => {
  fc.assert(
    fc.property(fc.array(step, { minLength: 1, maxLength: 30 }), (steps) => {
      const { index, listing, say, begins, held, budget } = rig();
      /** By namespace and medium: which blocks of which prompt. */
      const truth = new Map<string, Set<number>>();
      const at = (namespace: string, medium: string): Set<number> => {
        const key = `${namespace}/${medium}`;
        const those = truth.get(key) ?? new Set();
        truth.set(key, those);
        return those;
      };
      const most = (chain: number): number => {
        const needed = listing.namespaces.map((namespace) => {
          let count = 0;
          const has = (block: number): boolean =>
            ['CPU', 'DISK'].some((medium) => at(namespace, medium).has(length * chain + block));
          while (count < length && has(count)) count++;
          return count;
        });
        return Math.min(...needed, needed.length === 0 ? 0 : length);
      };
      for (const { kind, chain, from, blocks, medium, namespace, order } of steps) {
        const to = Math.min(length, from + blocks);
        const those = at(namespace, medium);
        const named = Array.from({ length: to - from }, (_, i) => length * chain + from + i);
        if (kind === 'store' || kind === 'bare') {
          say([(kind === 'store' ? described : bare)(prompts[chain]!, from, to, medium)], namespace);
          for (const block of named) those.add(block);
        } else if (kind === 'remove') {
          say([removed(prompts[chain]!, from, to, medium)], namespace);
          for (const block of named) those.delete(block);
        } else if (kind === 'clear') {
          say([{ type: 'AllBlocksCleared', medium }], namespace);
          those.clear();
        } else {
          begins(kind === 'restart' ? 'restarted' : 'snapshot');
          const all = [...truth].flatMap(([key, blocks]) => [...blocks].map((block) => [key, block] as const));
          const mixed = all.map((one, i) => [order[i % 64]!, one] as const).sort(([a], [b]) => a - b);
          for (const [, [key, block]] of mixed) {
            const [where, what] = key.split('/') as [string, string];
            const place = block % length;
            say([described(prompts[Math.floor(block / length)]!, place, place + 1, what)], where);
          }
          for (const number of [0, 1]) expect(held(prompts[number]!)).toBe(most(number));
        }
        for (const number of [0, 1]) expect(held(prompts[number]!)).toBeLessThanOrEqual(most(number));
        index.checkIntegrity();
      }
      listing.forget();
      expect(budget.bytes).toBe(0);
    }),
    { numRuns: 150 },
  );
});
