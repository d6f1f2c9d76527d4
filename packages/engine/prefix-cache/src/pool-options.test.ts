/** Options beyond vLLM: pinned prefixes, eviction policies, de-duplication. All off by default. */
import { blockPolicyNames } from '@kvtier/eviction';
import { describe, expect, it } from 'vitest';
import { KvCacheManager, type KvCacheManagerOptions } from './kv-cache-manager.ts';
import { TokenRequest } from './testing/token-request.ts';

const manager = (options: Partial<KvCacheManagerOptions> = {}): KvCacheManager =>
  new KvCacheManager({ blockCount: 9, blockTokens: 2, maxModelTokens: 40, ...options });

/** Compute a prompt of `length` tokens that begins with `first`, and let it go. Returns its blocks. */
function serve(kv: KvCacheManager, first: number, length = 4): readonly number[] {
  const tokens = Array.from({ length }, (_, i) => (i === 0 ? first : i));
  const request = new TokenRequest(`${first}`, tokens);
  const computed = kv.getComputedBlocks(request);
  expect(kv.allocateSlots(request, length - computed.tokens, { computed })).not.toBeNull();
  const blocks = [...kv.blockTables(request.id)[0]!];
  kv.free(request.id);
  kv.checkIntegrity();
  return blocks;
}

const hitTokens = (kv: KvCacheManager, first: number, length = 4): number =>
  kv.getComputedBlocks(new TokenRequest('lookup', [first, ...Array.from({ length }, (_, i) => i + 1)])).tokens;

describe('blocks that are read while they are free', () => {
  it.each([undefined, ...blockPolicyNames])('keep their place in the order of eviction (%s)', (evictionPolicy) => {
    const kv = manager({ evictionPolicy });
    for (const first of [100, 101, 102]) serve(kv, first);
    serve(kv, 101);
    const before = kv.snapshot().free;
    const soon = kv.nextEvicted(6);
    expect(soon.length).toBe(5); // one block was never used and goes first
    expect(before.slice(1, 6)).toEqual(soon);
    const letGo = kv.holdInPlace(soon.slice(1));
    expect(kv.freeBlockCount).toBe(4);
    expect(kv.nextEvicted(6)).not.toContain(soon[1]);
    letGo();
    expect(kv.snapshot().free).toEqual(before);
    kv.checkIntegrity();
  });

  it('are found meanwhile, and whoever uses them decides their place', () => {
    const kv = manager();
    serve(kv, 100);
    serve(kv, 101);
    const letGo = kv.holdInPlace([...kv.nextEvicted(8)].reverse());
    const [used, ...others] = serve(kv, 100, 3); // hits the first block of its chain
    const places = kv.snapshot().free;
    letGo();
    expect(kv.snapshot().free.at(-1)).toBe(used);
    expect(others.length).toBe(1);
    expect(kv.snapshot().free.length).toBe(8);
    expect(places).not.toContain(used); // still read when its request was over
    kv.checkIntegrity();
  });

  it('are nothing special once they have lost their hash', () => {
    const kv = manager();
    const [block] = serve(kv, 100, 2);
    const letGo = kv.holdInPlace([block!]);
    kv.evictBlocks([block!]);
    letGo();
    expect(kv.snapshot().free[0]).toBe(block);
    kv.checkIntegrity();
  });
});

describe('pinned prefixes', () => {
  const request = (first: number): TokenRequest => new TokenRequest('pin', [first, 1, 2, 3]);

  it('stay through any pressure, and go when they are unpinned', () => {
    const kv = manager({ maxPinnedBlocks: 4 });
    serve(kv, 100);
    expect(kv.pinPrefix('system', request(100))).toBe(4); // its last token too: a pin is no request
    expect([kv.pinnedBlockCount, kv.freeBlockCount]).toEqual([2, 6]);
    for (let i = 0; i < 20; i++) serve(kv, i);
    expect(hitTokens(kv, 100)).toBe(4);
    expect(kv.unpinPrefix('system')).toBe(true);
    expect(kv.unpinPrefix('system')).toBe(false);
    expect([kv.pinnedBlockCount, kv.freeBlockCount]).toEqual([0, 8]);
    for (let i = 20; i < 40; i++) serve(kv, i);
    expect(hitTokens(kv, 100)).toBe(0);
  });

  it('are bounded in blocks, each counted once', () => {
    const kv = manager({ maxPinnedBlocks: 3 });
    serve(kv, 100);
    serve(kv, 101);
    kv.pinPrefix('a', request(100));
    kv.pinPrefix('again', request(100));
    expect(kv.pinnedBlockCount).toBe(2);
    expect(() => kv.pinPrefix('b', request(101))).toThrow(
      'pinned prefix b: takes 2 more, 2 of 3 blocks are pinned by 2 of 1024 names; unpin others or pin fewer tokens',
    );
    kv.unpinPrefix('a');
    expect(kv.pinnedBlockCount).toBe(2);
    kv.unpinPrefix('again');
    expect(kv.pinPrefix('b', request(101))).toBe(4);
    expect(() => manager().pinPrefix('c', request(0))).not.toThrow(); // nothing is cached: nothing is held
  });

  it('are pinned anew under the same name', () => {
    const kv = manager({ maxPinnedBlocks: 3 });
    serve(kv, 100);
    serve(kv, 101);
    const longer = [100, 1, 2, 3, 4, 5, 6];
    const served = new TokenRequest('longer', longer);
    kv.allocateSlots(served, longer.length, { computed: kv.getComputedBlocks(served) });
    kv.free('longer');
    for (let again = 0; again < 2; again++) {
      expect(kv.pinPrefix('a', request(100))).toBe(4);
      expect([kv.pinnedBlockCount, kv.freeBlockCount]).toEqual([2, 6]);
      kv.checkIntegrity();
    }
    expect(kv.pinPrefix('a', new TokenRequest('pin', longer))).toBe(6);
    expect([kv.pinnedBlockCount, kv.freeBlockCount]).toEqual([3, 5]);
    expect(kv.pinPrefix('a', request(101))).toBe(4); // three go, two come: within the bound
    expect([kv.pinnedBlockCount, kv.freeBlockCount]).toEqual([2, 6]);
    kv.pinPrefix('b', request(101));
    expect(() => kv.pinPrefix('b', request(100))).toThrow(expect.objectContaining({ code: 'CONFIG' }));
    expect([kv.unpinPrefix('a'), kv.pinnedBlockCount]).toEqual([true, 2]); // what b held stays
    expect([kv.pinPrefix('b', request(7)), kv.pinnedBlockCount, kv.unpinPrefix('b')]).toEqual([0, 0, false]);
    kv.checkIntegrity();
  });

  it('make a reset refuse, as every block that is held', () => {
    const kv = manager({ maxPinnedBlocks: 8 });
    serve(kv, 100);
    kv.pinPrefix('system', request(100));
    expect(kv.resetPrefixCache()).toBe(false);
    kv.unpinPrefix('system');
    expect(kv.resetPrefixCache()).toBe(true);
  });

  it('are no requests: a common prefix is one of all tables', () => {
    const kv = manager({ maxPinnedBlocks: 8 });
    const [a, b] = [new TokenRequest('a', [1, 2, 3]), new TokenRequest('b', [4, 5, 6])];
    kv.allocateSlots(a, 3);
    kv.allocateSlots(b, 3);
    kv.pinPrefix('system', a); // its first block now has as many references as there are requests
    expect(kv.commonPrefixBlocks('a')).toEqual([0]);
    kv.free('b');
    expect(kv.commonPrefixBlocks('a')).toEqual([2]);
    kv.checkIntegrity();
  });

  it('hold what every group needs of them', () => {
    const groups = [
      { kind: 'full_attention', blockTokens: 2 },
      { kind: 'sliding_window', blockTokens: 2, windowTokens: 3 },
    ] as const;
    const kv = manager({ maxPinnedBlocks: 8, groups });
    serve(kv, 100);
    expect(kv.pinPrefix('system', request(100))).toBe(4);
    expect(kv.pinnedBlockCount).toBe(3); // two of full attention, the last one of the window
  });
});

describe('eviction policies', () => {
  /** Serve prompts of two blocks in this order in a pool of three prompts; which of them are cached in the end? */
  const cachedAfter = (policy: KvCacheManagerOptions['evictionPolicy'], order: readonly number[]): number[] => {
    const kv = manager({ evictionPolicy: policy });
    for (const first of order) serve(kv, first, 5);
    return [...new Set(order)].filter((first) => hitTokens(kv, first) === 4).sort((a, b) => a - b);
  };

  it('the default and lru keep what was used last', () => {
    const order = [1, 2, 3, 1, 4, 5];
    expect(cachedAfter('lru', order)).toEqual(cachedAfter(undefined, order));
    expect(cachedAfter('lru', order)).toEqual([1, 4, 5]);
  });

  it('fifo lets the first go whatever is used', () => {
    expect(cachedAfter('fifo', [1, 2, 3, 1, 1, 4, 5])).not.toContain(1);
  });

  it.each(['lfu', 'cost-aware', 's3-fifo'] as const)('%s keeps what is used often through a scan', (policy) => {
    const scan = Array.from({ length: 6 }, (_, i) => 50 + i);
    expect(cachedAfter(policy, [1, 1, 1, 1, 1, ...scan])).toContain(1);
    expect(cachedAfter('lru', [1, 1, 1, 1, 1, ...scan])).not.toContain(1);
  });

  it.each(blockPolicyNames)('%s evicts a chain from its tail', (policy) => {
    const kv = manager({ evictionPolicy: policy, blockCount: 7 });
    serve(kv, 1, 9); // four full blocks
    const held = new TokenRequest('held', [90, 91, 92, 93, 94]);
    kv.allocateSlots(held, 5); // two unused ones, and one that was cached
    expect(hitTokens(kv, 1, 9)).toBe(6);
    kv.allocateSlots(new TokenRequest('other', [80, 81]), 2);
    expect(hitTokens(kv, 1, 9)).toBe(4);
  });
});

describe('de-duplication', () => {
  const fill = (kv: KvCacheManager, requests: readonly TokenRequest[]): void => {
    for (const request of requests) {
      const count = request.tokenCount - request.computedTokens;
      expect(kv.allocateSlots(request, count, { delayCacheBlocks: true })).not.toBeNull();
      request.running = true;
    }
    for (const request of requests) {
      request.computedTokens = request.tokenCount;
      kv.cacheBlocks(request, request.tokenCount);
      kv.checkIntegrity();
    }
  };
  const twins = (): [TokenRequest, TokenRequest] => [
    new TokenRequest('a', [1, 2, 3, 4, 5]),
    new TokenRequest('b', [1, 2, 3, 4, 6]),
  ];

  it('the second of two that fill alike names the first one’s blocks, and its own are free', () => {
    const kv = manager({ dedupBlocks: true, enableEvents: true });
    const [a, b] = twins();
    fill(kv, [a, b]);
    expect([kv.blockTables('a'), kv.blockTables('b')]).toEqual([[[1, 2, 3]], [[1, 2, 6]]]);
    expect(kv.snapshot().free).toEqual([5, 4, 7, 8]);
    expect(kv.takeEvents()).toHaveLength(1); // nothing new was stored by the second
    a.tokens.push(7);
    b.tokens.push(7);
    fill(kv, [a, b]);
    expect(kv.blockTables('b')).toEqual([[1, 2, 6]]);
    const [stored] = kv.takeEvents().slice(1);
    expect(stored).toMatchObject({ type: 'BlockStored', tokenIds: [6, 7], blockHashes: [b.hashes.keyAt(2)] });
    kv.free('a');
    kv.free('b');
    kv.checkIntegrity();
    expect(kv.freeBlockCount).toBe(8);
  });

  it('off, both keep theirs, as in vLLM V1', () => {
    const kv = manager();
    fill(kv, twins());
    expect([kv.blockTables('a'), kv.blockTables('b')]).toEqual([[[1, 2, 3]], [[4, 5, 6]]]);
    expect(kv.cachedBlockCount).toBe(2);
  });

  it('finds a block behind one that is new, and tells of the new one alone', () => {
    const kv = manager({ dedupBlocks: true, enableEvents: true });
    const [a, b] = twins();
    fill(kv, [a]);
    kv.evictBlocks([1]);
    kv.takeEvents();
    fill(kv, [b]);
    expect(kv.blockTables('b')).toEqual([[4, 2, 6]]);
    expect(kv.takeEvents()).toMatchObject([{ blockHashes: [b.hashes.keyAt(0)], tokenIds: [1, 2, 3, 4] }]);
  });

  it('must know that the content is there', () => {
    const kv = manager({ dedupBlocks: true });
    expect(() => kv.allocateSlots(new TokenRequest('a', [1, 2]), 2)).toThrow('dedupBlocks needs delayCacheBlocks');
  });
});
