/** Engines that hash otherwise than we do share one budget for the names of their blocks, whatever they tell. */
import { workerRecordSchema } from '@kvtier/config';
import { encodeBatch, type KvEvent, type PackedBatch, PackedDecoder, type StreamItem } from '@kvtier/events';
import { ChainHasher } from '@kvtier/identity';
import * as fc from 'fast-check';
import { expect, it, vi } from 'vitest';
import { keysOfHashes } from '../keys.ts';
import { KvIndex } from '../kv-index.ts';
import { EngineListing } from './engine-listing.ts';
import type { FollowedWorker } from './followed.ts';
import type { Subscribe } from './followed-stream.ts';
import { IndexFeed } from './index-feed.ts';
import { LieCounts, Lies } from './lies.ts';
import { mediumNumbers } from './media.ts';
import { NamesBudget } from './names-budget.ts';

const blockTokens = 1;
const hasher = new ChainHasher({ algorithm: 'xxhash_cbor', blockTokens });
const workers = 3;
const chains = 4;
/** The names of three workers with all blocks of all chains take three times as many bytes as there are. */
const chainBlocks = 2_000;
const [indexBytes, namesBytes] = [2 << 20, 600 << 10];

const prompts = Array.from({ length: chains }, (_, chain) => {
  const tokens = Uint32Array.from({ length: chainBlocks * blockTokens }, (_, i) => 100_000 * chain + i);
  const packed = hasher.hashBlocks(null, tokens);
  // By the engine's own names.
  const hashes = Array.from({ length: chainBlocks }, (_, i) => BigInt(1_000_003 * (chainBlocks * chain + i + 1)) << 8n);
  return { tokens: [...tokens], hashes, keys: keysOfHashes(packed, hasher.hashBytes) };
});

const event = (blockHashes: readonly bigint[], parent: bigint | null, tokenIds: readonly number[]): KvEvent => ({
  ...{ type: 'BlockStored', blockHashes, parentBlockHash: parent, tokenIds, blockSize: blockTokens },
  ...{ loraId: null, loraName: null, medium: 'GPU' },
});

function rig() {
  const index = new KvIndex({ maxBytes: indexBytes, countedMedia: 1 << mediumNumbers.gpu });
  const budget = new NamesBudget(namesBytes);
  const lines: string[] = [];
  let leftOut = 0;
  const tellers = Array.from({ length: workers }, (_, number) => {
    const log = { info: () => undefined, warn: (_: object, line: string) => void lines.push(line) };
    const lies = new Lies(`worker ${number}`, new LieCounts(), log, () => 0);
    const onLeftOut = (blocks: number): void => {
      leftOut += blocks;
    };
    const renaming = { hasher, budget };
    const listing = new EngineListing({ index, blockTokens, maxBlocks: 1e6, renaming, lies, onLeftOut });
    const decoder = new PackedDecoder({ tokens: true });
    const say = (told: KvEvent): void => {
      const batch = decoder.decode(encodeBatch({ ts: 1, events: [told], dataParallelRank: 0 }, { encoding: 'map' }));
      for (const _ of listing.apply({ kind: 'batch', seq: 0, topic: '', batch }));
    };
    return { listing, say };
  });
  const held = (number: number, chain: number): number => {
    const sources = tellers[number]!.listing.ranks().flatMap((groups) => groups.map((part) => part!.source));
    return sources.length === 0 ? 0 : index.match(prompts[chain]!.keys, [{ sources }])[0]!.blocks;
  };
  return { index, budget, tellers, lines, held, leftOut: () => leftOut };
}

const step = fc.record({
  kind: fc.constantFrom('more', 'more', 'more', 'less', 'forget', 'reset'),
  ...{ worker: fc.nat(workers - 1), chain: fc.nat(chains - 1), blocks: fc.integer({ min: 1, max: chainBlocks }) },
});

it('never more than the budget, never more held than is, all given back in the end', () => {
  fc.assert(
    fc.property(fc.array(step, { minLength: 1, maxLength: 24 }), (steps) => {
      const { index, budget, tellers, held } = rig();
      const truth = tellers.map(() => Array.from({ length: chains }, () => 0));
      for (const { kind, worker, chain, blocks } of steps) {
        const { hashes, tokens } = prompts[chain]!;
        const { listing, say } = tellers[worker]!;
        const before = truth[worker]![chain]!;
        if (kind === 'forget') {
          listing.forget();
          truth[worker]!.fill(0);
        } else if (kind === 'reset') {
          say({ type: 'AllBlocksCleared' });
          truth[worker]!.fill(0);
        } else if (kind === 'more') {
          const to = Math.min(chainBlocks, before + blocks);
          const parent = before === 0 ? null : hashes[before - 1]!;
          if (to > before) say(event(hashes.slice(before, to), parent, tokens.slice(before, to)));
          truth[worker]![chain] = to;
        } else {
          const from = Math.max(0, before - blocks);
          if (from < before) say({ type: 'BlockRemoved', blockHashes: hashes.slice(from, before), medium: 'GPU' });
          truth[worker]![chain] = from;
        }
        expect(budget.bytes).toBeLessThanOrEqual(namesBytes);
        expect(index.stats().bytes).toBeLessThanOrEqual(indexBytes);
        expect(held(worker, chain)).toBeLessThanOrEqual(truth[worker]![chain]!);
      }
      for (const [number, { listing, say }] of tellers.entries()) {
        if (number % 2 === 0) listing.forget();
        else say({ type: 'AllBlocksCleared' });
      }
      expect(budget.bytes).toBe(0);
    }),
    { numRuns: 20 },
  );
});

it('what has no room is left out, counted, and told in one line; what is named stays, and room that comes is used', () => {
  const { tellers, lines, held, leftOut } = rig();
  for (const { say } of tellers)
    for (const { hashes, tokens } of prompts) {
      say(event(hashes.slice(0, 1_500), null, tokens.slice(0, 1_500)));
      say(event(hashes.slice(1_500), hashes[1_499]!, tokens.slice(1_500)));
    }
  const named = tellers.map((_, number) => prompts.map((_, chain) => held(number, chain)));
  expect(named[0]).toEqual(prompts.map(() => chainBlocks));
  const all = named.flat().reduce((sum, blocks) => sum + blocks, 0);
  expect(all).toBeLessThan(workers * chains * chainBlocks);
  expect(leftOut()).toBe(workers * chains * chainBlocks - all);
  const spent = `${namesBytes} bytes for names of blocks are taken; raise the coordinator's index.maxBytes; ignored`;
  expect(lines).toEqual([1, 2].map((number) => `KV events of worker ${number}: no room to name them, ${spent}`));
  tellers[0]!.listing.forget();
  const { hashes, tokens } = prompts[0]!;
  tellers[2]!.say(event(hashes, null, tokens));
  expect(held(2, 0)).toBe(chainBlocks);
});

it('index and names of three pods that tell of more than there is room for are within the bytes of their feed', async () => {
  const [told, count] = [40_000, 10_000];
  const subscribe: Subscribe = ({ endpoint }) => ({
    connected: true,
    async *packed() {
      const number = Number(endpoint.at(-1));
      const decoder = new PackedDecoder({ tokens: true });
      for (let from = 0; from < told; from += count) {
        const hashes = Array.from(
          { length: count },
          (_, i) => BigInt(1_000_003 * (number * told + from + i + 1)) << 8n,
        );
        const tokens = hashes.map((_, i) => number * told + from + i);
        const events = [event(hashes, null, tokens)];
        const batch = decoder.decode(encodeBatch({ ts: 1, events, dataParallelRank: 0 }, { encoding: 'map' }));
        yield [{ kind: 'batch', seq: from, topic: '', batch } satisfies StreamItem<PackedBatch>];
      }
      await new Promise<void>(() => {});
    },
    resync: () => {},
    stats: () => ({ gaps: 0, restarts: 0, snapshots: 0, reconnects: 0 }) as ReturnType<ReturnType<Subscribe>['stats']>,
    close: () => {},
  });
  const logger = { info: () => {}, warn: () => {} };
  const maxBytes = 4 << 20;
  const feed = new IndexFeed({ maxBytes, blockTokens, hashAlgorithm: 'xxhash_cbor', logger, subscribe });
  try {
    feed.follow(
      Array.from({ length: workers }, (_, number): FollowedWorker => {
        const events = { endpoint: `ipc:///tmp/${number}` };
        const record = workerRecordSchema.parse({ name: `w${number}`, kind: 'openai', address: 'http://x', events });
        return { number, record, node: undefined };
      }),
    );
    const heard = (): number => feed.state().index.blocks + feed.state().totals.droppedBlocks;
    await vi.waitFor(() => expect(heard()).toBeGreaterThanOrEqual(workers * told), { timeout: 20_000 });
    const { index, namesBytes, totals } = feed.state();
    const unnamedBlocks = totals.droppedBlocks - index.droppedBlocks;
    expect(unnamedBlocks).toBeGreaterThan(0);
    expect(totals.lies.no_room).toBeGreaterThan(0);
    expect(index.bytes + namesBytes).toBeLessThanOrEqual(maxBytes);
    feed.follow([]);
    expect(feed.state().namesBytes).toBe(0);
  } finally {
    feed.close();
  }
});
