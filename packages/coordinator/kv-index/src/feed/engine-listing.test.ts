/** Events as they travel, applied to the index, against what they say written down in the plainest way; and what cannot be. */
import { encodeBatch, type KvEvent, PackedDecoder } from '@kvtier/events';
import { NaiveHolders } from '@kvtier/events/testing';
import { ChainHasher } from '@kvtier/identity';
import * as fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { keysOfHashes } from '../keys.ts';
import { KvIndex } from '../kv-index.ts';
import { EngineListing } from './engine-listing.ts';
import { LieCounts, Lies } from './lies.ts';
import { mediumNumbers } from './media.ts';
import { NamesBudget } from './names-budget.ts';
import { matchView } from './views.ts';

const blockTokens = 4;

function rig({
  hasher,
  maxBlocks = 1_000,
  maxBytes = 1 << 20,
  index = new KvIndex({ maxBytes, countedMedia: 1 << mediumNumbers.gpu }),
}: {
  hasher?: ChainHasher;
  maxBlocks?: number;
  maxBytes?: number;
  index?: KvIndex;
} = {}) {
  const counts = new LieCounts();
  const lines: string[] = [];
  const log = { info: () => undefined, warn: (_: object, message: string) => void lines.push(message) };
  const lies = new Lies('worker a', counts, log, () => 0);
  const budget = new NamesBudget(1 << 20);
  const renaming = hasher && { hasher, budget };
  const listing = new EngineListing({ index, blockTokens, maxBlocks, renaming, lies });
  const decoder = new PackedDecoder({ tokens: hasher !== undefined });
  const say = (events: readonly KvEvent[], rank = 0, encoding: 'map' | 'array' = 'map'): boolean => {
    const batch = decoder.decode(encodeBatch({ ts: 1, events, dataParallelRank: rank }, { encoding }));
    const work = listing.apply({ kind: 'batch', seq: 0, topic: '', batch });
    let step = work.next();
    while (step.done !== true) step = work.next();
    return step.value;
  };
  const holds = (hash: bigint): { rank: number; medium: number }[] => {
    const held = index.holdersOf(Number(BigInt.asIntN(32, hash)), Number(BigInt.asIntN(32, hash >> 32n)));
    return listing
      .ranks()
      .flatMap((groups, rank) =>
        groups.flatMap((part) =>
          Object.values(mediumNumbers).flatMap((medium) =>
            part && (held[part.source]! >> medium) & 1 ? [{ rank, medium }] : [],
          ),
        ),
      );
  };
  return { index, listing, say, holds, budget, lies: counts.byKind, lines };
}

const stored = (blockHashes: readonly bigint[], more: object = {}): KvEvent => ({
  ...{ type: 'BlockStored', blockHashes, parentBlockHash: null, tokenIds: [], blockSize: blockTokens },
  ...{ loraId: null, loraName: null, medium: 'GPU', ...more },
});
const removed = (blockHashes: readonly bigint[], medium = 'GPU'): KvEvent => ({
  type: 'BlockRemoved',
  blockHashes,
  medium,
});

describe('what an engine says of its blocks', () => {
  it('is what the index knows, by rank, whatever it says in which order and encoding', () => {
    const hashes = fc.array(fc.bigInt({ min: 0n, max: 6n }), { maxLength: 4 });
    const action = fc.record({
      kind: fc.constantFrom('stored', 'removed', 'cleared'),
      ...{ hashes, rank: fc.nat(1), encoding: fc.constantFrom('map' as const, 'array' as const) },
    });
    fc.assert(
      fc.property(fc.array(action, { maxLength: 40 }), (actions) => {
        const { index, say, holds, listing } = rig();
        const truth = new NaiveHolders();
        for (const { kind, hashes, rank, encoding } of actions) {
          const event: KvEvent =
            kind === 'cleared' ? { type: 'AllBlocksCleared' } : kind === 'stored' ? stored(hashes) : removed(hashes);
          say([event], rank, encoding);
          const batch = { ts: 1, events: [event], dataParallelRank: rank };
          truth.apply('a', { kind: 'batch', seq: 0, topic: '', batch });
          for (let hash = 0n; hash <= 6n; hash++) expect(holds(hash).length).toBe(truth.holdersOf(hash).length);
        }
        index.checkIntegrity();
        listing.forget();
        for (let hash = 0n; hash <= 6n; hash++) expect(holds(hash)).toEqual([]);
      }),
      { numRuns: 100 },
    );
  });

  it('what the index has forgotten for want of room makes nobody a liar', () => {
    const hasher = new ChainHasher({ algorithm: 'xxhash_cbor', blockTokens });
    const { index, say, lies } = rig({ hasher, maxBlocks: 1_000_000 });
    const block = (n: number, parent: bigint | null = null): KvEvent =>
      stored([BigInt(n)], { parentBlockHash: parent, tokenIds: [n, 1, 2, 3] });
    say([block(1), stored([1n], { medium: 'CPU', blockSize: 0 })]);
    for (let n = 1_000; index.stats().droppedBlocks === 0; n++) say([block(n)]);
    // Its block is forgotten, and with its copy on the CPU its name goes; on the GPU it is still there.
    say([removed([1n], 'CPU'), block(2, 1n)]);
    expect(lies.parent).toBe(0);
  });

  it('who tells of blocks after one that was never told of is told so, whatever the index dropped before', () => {
    const hasher = new ChainHasher({ algorithm: 'xxhash_cbor', blockTokens });
    const { index, say, lies, listing } = rig({ hasher, maxBlocks: 1_000_000 });
    const block = (n: number, parent: bigint | null = null): KvEvent =>
      stored([BigInt(n)], { parentBlockHash: parent, tokenIds: [n, 1, 2, 3] });
    for (let n = 1_000; index.stats().droppedBlocks === 0; n++) say([block(n)]);
    say([block(2, 1n)]);
    expect(lies.parent).toBe(0); // the index may have dropped it
    const other = rig({ hasher, index });
    other.say([block(2, 1n)]);
    expect(other.lies.parent).toBe(1);
    listing.forget();
    say([block(2, 1n)]);
    expect(lies.parent).toBe(1);
  });

  it('a block of its pool is there as often as it was stored; of a tier, once', () => {
    const { say, holds } = rig();
    say([stored([1n]), stored([1n]), stored([1n], { medium: 'CPU' }), stored([1n], { medium: 'CPU' })]);
    say([removed([1n]), removed([1n], 'CPU')]);
    expect(holds(1n)).toEqual([{ rank: 0, medium: 0 }]);
    say([removed([1n])]);
    expect(holds(1n)).toEqual([]);
  });

  it.each(['map', 'array'] as const)('a hit that is told is no copy more: it goes with the block (%s)', (encoding) => {
    const { say, holds } = rig();
    say([stored([1n, 2n])], 0, encoding);
    for (let i = 0; i < 3; i++) say([stored([1n, 2n], { reused: true })], 0, encoding);
    expect(holds(2n)).toEqual([{ rank: 0, medium: 0 }]);
    say([removed([2n])], 0, encoding);
    expect([holds(1n), holds(2n)]).toEqual([[{ rank: 0, medium: 0 }], []]);
    // Of one that was not told before, nothing is believed: its events have a gap, or it is gone since.
    say([stored([2n], { reused: true })], 0, encoding);
    expect(holds(2n)).toEqual([]);
  });

  it('counts for a worker where all its groups have what they need, and the rank that holds least', () => {
    const { index, say, listing } = rig();
    const chain = [1n, 2n, 3n, 4n, 5n, 6n];
    const window = { groupIdx: 1, kvCacheSpecKind: 'sliding_window', kvCacheSpecSlidingWindow: 2 * blockTokens + 1 };
    say([stored(chain, { groupIdx: 0, kvCacheSpecKind: 'full_attention' }), stored([3n, 4n, 6n], window)]);
    const keys = Int32Array.from(chain.flatMap((hash) => [Number(hash), 0]));
    const blocks = (): number => {
      const view = listing.ranks().map((groups) =>
        groups.map((part) => ({
          sources: [part!.source],
          windowBlocks: part!.window.tokens && Math.ceil((part!.window.tokens - 1) / blockTokens),
        })),
      );
      return matchView(index, keys, view).blocks;
    };
    // The window's blocks 5 and 6 are not both there; 3 and 4 are.
    expect(blocks()).toBe(4);
    say([stored([5n], window)]);
    expect(blocks()).toBe(6);
    say([stored(chain.slice(0, 2), { groupIdx: 0 }), stored(chain.slice(0, 1), window)], 1);
    expect(blocks()).toBe(1);
  });

  it('is another thing once another window is told of a group; a kind that is empty tells of none', () => {
    const { say, listing } = rig();
    const windows = (): (number | undefined)[] => listing.ranks()[0]!.map((part) => part!.window.tokens);
    const window = { kvCacheSpecKind: 'sliding_window', kvCacheSpecSlidingWindow: 9 };
    expect(say([stored([1n], { kvCacheSpecKind: '' })])).toBe(true);
    expect([say([stored([2n], window)]), windows()]).toEqual([true, [9]]);
    expect([say([stored([3n], window)]), windows()]).toEqual([false, [9]]);
    expect([say([stored([4n], { kvCacheSpecKind: '', kvCacheSpecSlidingWindow: null })]), windows()]).toEqual([
      false,
      [9],
    ]);
    expect([say([stored([5n], { kvCacheSpecKind: 'full_attention' })]), windows()]).toEqual([true, [undefined]]);
  });

  it('of one that hashes otherwise, those after blocks with a salt or an image are left out with them, and nobody is a liar', () => {
    const { index, say, lies, lines, listing } = rig({
      hasher: new ChainHasher({ algorithm: 'xxhash_cbor', blockTokens }),
    });
    const block = (n: number, parent: bigint | null, extraKeys: unknown[] | null): KvEvent =>
      stored([BigInt(n)], { parentBlockHash: parent, tokenIds: [n, 1, 2, 3], extraKeys: [extraKeys] });
    // As vLLM tells it: the salt belongs to the first block alone.
    say([block(1, null, ['tenant'])]);
    for (let n = 2; n < 10; n++) say([block(n, BigInt(n - 1), null)]);
    expect([index.stats().blocks, lies.parent, lines]).toEqual([0, 0, []]);
    // In another life of it there was none.
    listing.forget();
    say([block(9, 8n, null)]);
    expect(lies.parent).toBe(1);
  });

  it('of one that hashes otherwise, is known by its tokens, and forgotten by its own names', () => {
    const hasher = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens });
    const { index, say, listing, lies } = rig({ hasher });
    const tokens = Array.from({ length: 5 * blockTokens }, (_, i) => 100 + i);
    const keys = keysOfHashes(hasher.hashBlocks(null, Uint32Array.from(tokens)), 32);
    const blocks = (): number =>
      index.match(keys, [{ sources: listing.ranks()[0]?.map((part) => part!.source) ?? [] }])[0]!.blocks;
    const part = (from: number, to: number) => tokens.slice(from * blockTokens, to * blockTokens);
    say([stored([2n ** 63n, 7n], { tokenIds: part(0, 2) })], 0, 'array');
    say([stored([8n], { parentBlockHash: 7n, tokenIds: part(2, 3) })]);
    expect(blocks()).toBe(3);
    say([stored([10n], { parentBlockHash: 99n, tokenIds: part(4, 5) })]);
    say([stored([9n], { parentBlockHash: 8n, tokenIds: part(3, 4), loraName: 'sql' })]);
    expect([blocks(), lies.parent]).toEqual([3, 1]);
    say([removed([7n])]);
    expect(blocks()).toBe(1);
  });

  it('of one that hashes otherwise, is what was heard of each rank and medium, whatever goes that was there before', () => {
    const hasher = new ChainHasher({ algorithm: 'xxhash_cbor', blockTokens });
    const blocks = [0, 1, 2].map((block) => {
      const tokenIds = Array.from({ length: blockTokens }, (_, i) => 10 * block + i);
      const [low, high] = keysOfHashes(hasher.hashBlocks(null, Uint32Array.from(tokenIds)), hasher.hashBytes);
      return { name: BigInt(900 + block), hash: (BigInt(high!) << 32n) | BigInt.asUintN(32, BigInt(low!)), tokenIds };
    });
    const media = ['GPU', 'CPU'] as const;
    const kind = fc.constantFrom('stored', 'stored', 'removed', 'removed', 'cleared');
    const action = fc.record({ kind, block: fc.nat(2), rank: fc.nat(1), medium: fc.nat(1) });
    fc.assert(
      fc.property(fc.array(action, { maxLength: 30 }), (actions) => {
        const { say, holds, budget } = rig({ hasher });
        // Of both ranks something was heard: `holds` tells them by their order.
        for (const rank of [0, 1]) say([stored([1n], { blockSize: 0, medium: 'CPU' })], rank);
        const empty = () => blocks.map(() => 0);
        const heard = [0, 1].map(() => media.map(empty));
        const credited = (block: number) =>
          heard.flatMap((of, rank) => of.flatMap((held, medium) => (held[block]! > 0 ? [{ rank, medium }] : [])));
        for (const { kind, block, rank, medium } of actions) {
          const { name, tokenIds } = blocks[block]!;
          const held = heard[rank]![medium]!;
          if (kind === 'cleared') {
            say([{ type: 'AllBlocksCleared' }], rank);
            heard[rank] = media.map(empty);
          } else if (kind === 'removed') {
            say([removed([name], media[medium])], rank);
            held[block] = Math.max(0, held[block]! - 1);
          } else if (medium === 0) {
            // From the root on, all held: a hit, or it counts as one.
            say([stored([name], { tokenIds })], rank);
            held[block] = 1;
          } else {
            // Told without tokens: only what is named is known.
            say([stored([name], { blockSize: 0, medium: 'CPU' })], rank);
            if (credited(block).length > 0) held[block] = 1;
          }
          for (const [block, { hash }] of blocks.entries()) expect(holds(hash)).toEqual(credited(block));
        }
        for (const { name } of blocks) for (const rank of [0, 1]) say([removed([name], 'CPU')], rank);
        for (const rank of [0, 1]) say([{ type: 'AllBlocksCleared' }], rank);
        expect(budget.bytes).toBe(0);
      }),
      { numRuns: 200 },
    );
  });

  it('of one that hashes otherwise, names stay for the other ranks when one has told of too many blocks', () => {
    const hasher = new ChainHasher({ algorithm: 'xxhash_cbor', blockTokens });
    const { index, say, listing, lies, budget } = rig({ hasher, maxBlocks: 2 });
    const tokensOf = (name: bigint): number[] => Array.from({ length: blockTokens }, (_, i) => Number(name) + i);
    const block = (name: bigint, parentBlockHash: bigint | null = null): KvEvent =>
      stored([name], { parentBlockHash, tokenIds: tokensOf(name) });
    const keys = keysOfHashes(hasher.hashBlocks(null, Uint32Array.from(tokensOf(1n))), hasher.hashBytes);
    const blocks = (): number[] =>
      listing.ranks().map(([part]) => index.match(keys, [{ sources: [part!.source] }])[0]!.blocks);
    say([block(1n)], 0);
    say([block(1n), block(2n, 1n)], 1);
    expect([lies.too_many_blocks, blocks()]).toEqual([0, [1, 1]]);
    say([block(2n, 1n)], 1); // computed twice
    expect([lies.too_many_blocks, blocks()]).toEqual([1, [1, 0]]);
    say([removed([1n])], 0);
    expect(blocks()).toEqual([0, 0]);
    say([{ type: 'AllBlocksCleared' }], 0);
    expect(budget.bytes).toBe(0);
  });

  it('says when its sources are others than before, also where one goes and one comes in a batch', () => {
    const { say, lies } = rig({ hasher: new ChainHasher({ algorithm: 'sha256_cbor', blockTokens }), maxBlocks: 4 });
    const chain = (first: bigint, blocks: number): KvEvent =>
      stored(
        Array.from({ length: blocks }, (_, i) => first + BigInt(i)),
        { tokenIds: Array.from({ length: blocks * blockTokens }, (_, i) => Number(first) + i) },
      );
    expect([say([chain(1n, 2)]), say([chain(10n, 1)])]).toEqual([true, false]);
    expect(say([chain(20n, 3), chain(30n, 2)])).toBe(true);
    expect(lies.too_many_blocks).toBe(1);
    expect([say([chain(40n, 1)]), say([{ type: 'AllBlocksCleared' }])]).toEqual([false, false]);
  });

  it('is dealt with in turns: of blocks that have sets of holders of their own there are fewer in one, of small messages no more', () => {
    const { index, listing } = rig({ maxBlocks: 100_000, maxBytes: 256 << 20 });
    const others = Array.from({ length: 1_500 }, () => index.addSource());
    const decoder = new PackedDecoder({ tokens: false });
    const turnsOf = (...messages: readonly bigint[][]): number => {
      let turns = 1;
      for (const hashes of messages) {
        const batch = decoder.decode(encodeBatch({ ts: 1, events: [stored(hashes)], dataParallelRank: 0 }));
        const work = listing.apply({ kind: 'batch', seq: 0, topic: '', batch });
        for (; work.next().done !== true; turns++);
      }
      return turns;
    };
    const hashes = (from: number): bigint[] => Array.from({ length: 4_000 }, (_, i) => BigInt(from + i));
    const own = hashes(1);
    for (const [i, hash] of own.entries())
      for (const source of [i % 1_500, (i * 7 + 1) % 1_499])
        index.stored(others[source]!, 1, Int32Array.of(Number(hash), 0), 'unknown');
    expect(turnsOf(hashes(10_000))).toBe(1);
    expect(turnsOf(own)).toBeGreaterThanOrEqual(3);
    const small = Array.from({ length: 40 }, (_, i) => hashes(20_000 + 200 * i).slice(0, 200));
    expect(turnsOf(...small)).toBeGreaterThanOrEqual(2);
  });

  it('what cannot be is ignored, counted, and told in one line', () => {
    const { say, holds, lies, lines } = rig({ maxBlocks: 10 });
    say([stored([1n])]);
    for (let i = 0; i < 3; i++) {
      say([stored([2n], { blockSize: 32 }), stored([3n], { medium: 'MOON' }), stored([4n], { groupIdx: 99 })]);
      say([stored([5n])], 100_000);
    }
    expect(lies).toMatchObject({ block_size: 3, medium: 3, group: 3, rank: 3, too_many_blocks: 0 });
    expect(lines).toEqual([
      'KV events of worker a: blocks of 32 tokens, the index has blocks of 4; ignored',
      'KV events of worker a: blocks on MOON, which no engine has; ignored',
      'KV events of worker a: attention group 99; at most 15; ignored',
      'KV events of worker a: data-parallel rank 100000; at most 65535; ignored',
    ]);
    expect([1n, 2n, 3n, 4n, 5n].map((hash) => holds(hash).length)).toEqual([1, 0, 0, 0, 0]);
    // More than it can hold: nothing of it is believed.
    say([stored(Array.from({ length: 11 }, (_, i) => BigInt(100 + i)))]);
    expect([lies.too_many_blocks, holds(1n).length, holds(100n).length]).toEqual([1, 0, 0]);
  });
});
