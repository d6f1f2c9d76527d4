/** What vLLM's manager offers to connectors, workers and schedulers beyond allocation: one exact case per sentence. */
import { describe, expect, it } from 'vitest';
import type { AttentionSpec } from './attention-spec.ts';
import { KvCacheManager, type KvCacheManagerOptions } from './kv-cache-manager.ts';
import { RecentHits } from './stats.ts';
import { TokenRequest } from './testing/token-request.ts';

const full = (blockTokens = 2): AttentionSpec => ({ kind: 'full_attention', blockTokens });
const windowOf = (windowTokens: number): AttentionSpec => ({ kind: 'sliding_window', blockTokens: 2, windowTokens });
const states = (blockTokens = 2, mode: 'all' | 'align' = 'align'): AttentionSpec => ({
  kind: 'mamba',
  blockTokens,
  mode,
  speculativeBlocks: 0,
});

const manager = (options: Partial<KvCacheManagerOptions> = {}): KvCacheManager =>
  new KvCacheManager({ blockCount: 30, blockTokens: 2, maxModelTokens: 40, ...options });

const count = (tokens: number): number[] => Array.from({ length: tokens }, (_, i) => i);

/** Compute a request's tokens in steps that end at these places. */
function run(kv: KvCacheManager, id: string, tokens: readonly number[], ends = [tokens.length]): TokenRequest {
  const request = new TokenRequest(id, tokens);
  for (const end of ends) {
    kv.newStepStarts();
    expect(kv.allocateSlots(request, end - request.computedTokens)).not.toBeNull();
    request.running = true;
    request.computedTokens = end;
  }
  kv.newStepStarts();
  return request;
}

describe('a window over the answer', () => {
  const groups: AttentionSpec[] = [{ kind: 'rswa', blockTokens: 2, windowTokens: 3 }];

  it('lets go of [cdiv(prompt, bs), max(prompt, processed - window) // bs), and of nothing else', () => {
    const kv = manager({ groups });
    const request = run(kv, 'r', count(5));
    request.tokens.push(...count(8));
    kv.allocateSlots(request, 8);
    request.computedTokens = 13;
    expect(kv.blockTables('r')).toEqual([[1, 2, 3, 4, 5, 6, 7]]);
    kv.removeSkippedBlocks(request, 13); // 13 - 3 = 10: blocks 3 and 4
    expect(kv.blockTables('r')).toEqual([[1, 2, 3, 0, 0, 6, 7]]);
    expect(kv.freeBlockCount).toBe(24);
    expect(kv.covers('r', 13)).toBe(true);
    kv.removeSkippedBlocks(request, 13);
    kv.checkIntegrity();
    expect(kv.freeBlockCount).toBe(24);
    // A hit is that of full attention: what was let go is still cached.
    expect(kv.getComputedBlocks(new TokenRequest('s', request.tokens)).blocks).toEqual([[1, 2, 3, 4, 5, 6]]);
  });

  it('keeps all while it prefills', () => {
    const kv = manager({ groups });
    const request = run(kv, 'r', count(12), [6, 12]);
    kv.removeSkippedBlocks(request, 12);
    expect(kv.blockTables('r')).toEqual([[1, 2, 3, 4, 5, 6]]);
  });
});

describe('a hit for a connector', () => {
  it('is that of full attention where states lag behind', () => {
    const kv = manager({ groups: [full(), states()] });
    run(kv, 'a', count(8), [4, 8]);
    kv.evictBlocks([kv.blockTables('a')[1]![3]!]);
    const next = new TokenRequest('b', count(9));
    expect(kv.getComputedBlocks(next)).toMatchObject({ tokens: 4, sharedPrefixBoundary: 8 });
    const hit = kv.getComputedBlocksForConnector(next);
    expect(hit).toMatchObject({ tokens: 8, sharedPrefixBoundary: 0, diverged: true });
    expect(hit.blocks[0]).toEqual(kv.blockTables('a')[0]);
    // The states' own hit, which ends at 4: an external load brings the one at 8.
    expect(hit.blocks[1]).toHaveLength(2);
  });

  it('is the common one where states are deeper than full attention, and equal where nothing lags', () => {
    const kv = manager({ groups: [full(), states()] });
    run(kv, 'a', count(8), [4, 8]);
    const next = new TokenRequest('b', count(9));
    expect(kv.getComputedBlocksForConnector(next)).toMatchObject({ tokens: 8, diverged: false });
    kv.evictBlocks([kv.blockTables('a')[0]![2]!]);
    expect(kv.getComputedBlocksForConnector(next)).toMatchObject({ tokens: 4, diverged: false });
  });

  it.each<[string, AttentionSpec[]]>([
    ['one group', [full()]],
    ['no states', [full(), windowOf(4)]],
  ])('is the plain one: %s', (_name, groups) => {
    const kv = manager({ groups });
    run(kv, 'a', count(8));
    const next = new TokenRequest('b', count(9));
    expect(kv.getComputedBlocksForConnector(next)).toEqual({ ...kv.getComputedBlocks(next), diverged: false });
  });

  it('is empty when the request reads nothing', () => {
    const kv = manager();
    run(kv, 'a', count(8));
    const next = Object.assign(new TokenRequest('b', count(9)), { skipReadingPrefixCache: true });
    expect(kv.getComputedBlocksForConnector(next)).toEqual({
      blocks: [[]],
      tokens: 0,
      sharedPrefixBoundary: 0,
      diverged: false,
    });
  });
});

it('truncateComputedBlocks cuts every group at the same token', () => {
  const kv = manager({ groups: [full(2), full(4)], hashTokens: 2 });
  run(kv, 'a', count(12));
  const hit = kv.getComputedBlocks(new TokenRequest('b', count(13)));
  expect(hit.blocks.map(({ length }) => length)).toEqual([6, 3]);
  const cut = kv.truncateComputedBlocks(hit, 8);
  expect([cut.tokens, ...cut.blocks.map(({ length }) => length)]).toEqual([8, 4, 2]);
  expect(() => kv.truncateComputedBlocks(cut, 12)).toThrow('a hit of 8 tokens cut to 12');
});

it('blockIdsForComputedTokens clips attention and leaves states whole', () => {
  const kv = manager({ groups: [full(), states()] });
  run(kv, 'a', count(8), [4, 8]);
  const [attention, all] = kv.blockTables('a');
  expect(kv.blockIdsForComputedTokens('a', 5)).toEqual([attention!.slice(0, 3), all]);
  expect(kv.blockIdsForComputedTokens('nobody', 5)).toEqual([[], []]);
});

it('estimateCachedTokens is the least over groups of the furthest findable block', () => {
  const kv = manager({ groups: [full(), states()] });
  run(kv, 'a', count(8), [4, 8]);
  expect(kv.estimateCachedTokens('a')).toBe(8);
  kv.evictBlocks([kv.blockTables('a')[1]![3]!]);
  expect(kv.estimateCachedTokens('a')).toBe(4);
  expect(kv.estimateCachedTokens('nobody')).toBe(0);
});

it('unhashedBlocks are those that nobody could find', () => {
  const kv = manager();
  run(kv, 'a', count(5));
  expect(kv.unhashedBlocks('a')).toEqual([[3]]);
});

it('popBlocksForFree takes the table and leaves the blocks held, in its order', () => {
  const kv = manager({ groups: [full(), windowOf(3)] });
  run(kv, 'a', count(8), [4, 8]);
  const tables = kv.blockTables('a').flatMap((table) => table.filter((block) => block !== 0));
  const free = kv.freeBlockCount;
  expect(kv.popBlocksForFree('a')).toEqual(tables);
  expect(kv.blockTables('a')).toEqual([[], []]);
  expect(kv.freeBlockCount).toBe(free);
  kv.releaseBlocks([...tables].reverse());
  kv.checkIntegrity();
  expect(kv.freeBlockCount).toBe(29);
  expect(kv.popBlocksForFree('a')).toEqual([]);
});

describe('new blocks to be zeroed', () => {
  it('are told once, without those of a hit and targets of copies', () => {
    const kv = manager({ recordNewBlocks: true });
    run(kv, 'a', count(5));
    expect(kv.zeroingBlockIdsInRange('a', 2, 4)).toEqual([2]);
    expect(kv.takeNewBlockIds()).toEqual([1, 2, 3]);
    expect(kv.takeNewBlockIds()).toEqual([]);
    expect(kv.zeroingBlockIdsInRange('a', 0, 5)).toEqual([]);
    const next = new TokenRequest('b', count(7));
    const computed = kv.getComputedBlocks(next);
    kv.allocateSlots(next, 3, { computed });
    expect(kv.takeNewBlockIds()).toEqual([4, 5]);
  });

  it('are those of a failed load, from a token on', () => {
    const kv = manager({ recordNewBlocks: true });
    const request = new TokenRequest('a', count(9));
    kv.allocateSlots(request, 0, { externalComputedTokens: 8, delayCacheBlocks: true });
    expect(kv.takeNewBlockIds()).toEqual([1, 2, 3, 4]);
    kv.recordBlocksForZeroing('a', 4);
    expect(kv.takeNewBlockIds()).toEqual([3, 4]);
  });

  it('are not collected unless somebody zeroes', () => {
    const kv = manager();
    run(kv, 'a', count(5));
    kv.recordBlocksForZeroing('a', 0);
    expect(kv.takeNewBlockIds()).toEqual([]);
  });
});

describe('the end of a prompt inside a block', () => {
  const groups = [full(4), states(4)];
  /** Its prompt of 3 tokens ends at hash boundary 2; then it goes on. */
  const goOn = (kv: KvCacheManager): TokenRequest => {
    const request = run(kv, 'a', count(3), [2]);
    kv.newStepStarts();
    request.tokens.push(3, 4);
    expect(kv.allocateSlots(request, 3)).not.toBeNull();
    return request;
  };

  it('is offered to the connector where its state was copied to, and held until the request ends', () => {
    const kv = manager({ groups, hashTokens: 2 });
    goOn(kv);
    const copies = kv.takeBlockCopies();
    expect(copies).toHaveLength(1);
    const { source, target } = copies[0]!;
    expect(kv.takePartialTailOffloads()).toEqual([{ requestId: 'a', group: 1, block: target, tokens: 2 }]);
    expect(kv.takePartialTailOffloads()).toEqual([]);
    kv.releaseBlocks([source, target]);
    expect(kv.snapshot().refs.get(target)).toBe(1);
    kv.free('a');
    kv.checkIntegrity();
    expect(kv.freeBlockCount).toBe(29);
  });

  it('is among the blocks of a deferred free, first', () => {
    const kv = manager({ groups, hashTokens: 2 });
    goOn(kv);
    const [{ block } = { block: 0 }] = kv.takePartialTailOffloads();
    expect(kv.popBlocksForFree('a')[0]).toBe(block);
  });

  it('is gone with its step when nobody takes it', () => {
    const kv = manager({ groups, hashTokens: 2 });
    goOn(kv);
    kv.newStepStarts();
    expect(kv.takePartialTailOffloads()).toEqual([]);
  });
});

describe('report mode full', () => {
  it('tells of reused blocks as it told when they were new, and that they are not', () => {
    const kv = manager({ enableEvents: true, groups: [full(), windowOf(4)] });
    run(kv, 'a', count(8));
    const [stored] = kv.takeEvents();
    const next = Object.assign(new TokenRequest('b', count(9)), { reportMode: 'full' as const });
    const computed = kv.getComputedBlocks(next);
    kv.allocateSlots(next, 1, { computed });
    const events = kv.takeEvents();
    expect(events).toHaveLength(2);
    expect(events[0]).toEqual({ ...stored, reused: true });
    // A window's hit has two blocks; the event tells of those, and of all tokens up to their end.
    expect(events[1]).toMatchObject({
      type: 'BlockStored',
      groupIdx: 1,
      parentBlockHash: null,
      tokenIds: count(8),
      reused: true,
    });
    expect(events[1]).toHaveProperty('blockHashes.length', 2);
  });

  it('else reuse is silent', () => {
    const kv = manager({ enableEvents: true });
    run(kv, 'a', count(8));
    kv.takeEvents();
    const next = new TokenRequest('b', count(9));
    kv.allocateSlots(next, 1, { computed: kv.getComputedBlocks(next) });
    expect(kv.takeEvents()).toEqual([]);
  });
});

it('tokens in flight keep what the window has passed', () => {
  const kv = manager({ groups: [windowOf(3)] });
  const request = run(kv, 'a', count(8));
  request.tokens.push(8);
  request.inFlightTokens = 4;
  kv.allocateSlots(request, 1);
  expect(kv.blockTables('a')).toEqual([[0, 2, 3, 4, 5]]); // as after 4 tokens, not after 8
  request.computedTokens = 9;
  request.tokens.push(9);
  request.inFlightTokens = 0;
  kv.allocateSlots(request, 1);
  expect(kv.blockTables('a')).toEqual([[0, 0, 0, 4, 5]]);
});

it('the recent hit ratio is over the last requests, preempted ones aside', () => {
  const recent = new RecentHits(2);
  expect(recent.ratio).toBe(0);
  for (const hits of [0, 5, 10]) recent.record(10, hits);
  expect([recent.ratio, recent.requests]).toEqual([0.75, 2]);
  const kv = manager();
  kv.recordLookup(10, 5, false);
  kv.recordLookup(10, 10, true);
  expect(kv.recentHitRatio).toBe(0.5);
  expect(kv.resetPrefixCache()).toBe(true);
  expect(kv.recentHitRatio).toBe(0);
});
