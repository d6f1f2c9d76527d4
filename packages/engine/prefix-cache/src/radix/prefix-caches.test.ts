/**
 * Both prefix caches under the same random schedules of requests, against one naive map of prefixes: every lookup finds
 * exactly what is there, every block that a lookup names holds the content that it stands for, nobody's content is
 * overwritten, and every block comes back. Beside it what only the radix cache does.
 */
import { createHash } from 'node:crypto';
import { type HashKey, hashKeyOf } from '@kvtier/identity';
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { KvCacheManager } from '../kv-cache-manager.ts';
import { type PrefixCache, type PrefixCacheRequest, prefixCacheKinds } from '../prefix-cache.ts';
import { radixPolicies } from './eviction-queue.ts';
import { RadixCache } from './radix-cache.ts';
import { NaivePrefixes } from './testing/naive-prefixes.ts';

const blockTokens = 2;

/** A prefix's name is its content here, and its hash stands for it. */
const names = new Map<HashKey, string>();
const hashes = new Map<string, HashKey>();
const hashOf = (name: string): HashKey => {
  let hash = hashes.get(name);
  if (hash === undefined) {
    hash = hashKeyOf(createHash('md5').update(name).digest());
    hashes.set(name, hash);
    names.set(hash, name);
  }
  return hash;
};

class FakeRequest implements PrefixCacheRequest {
  readonly id: string;
  readonly extraKey: string;
  readonly tokens: number[];
  computedTokens = 0;
  running = true;
  readonly hashes;
  readonly #naive: NaivePrefixes;

  constructor(id: string, tokens: readonly number[], extraKey: string, naive: NaivePrefixes) {
    this.id = id;
    this.tokens = [...tokens];
    this.extraKey = extraKey;
    this.#naive = naive;
    const blockCount = (): number => Math.floor(this.tokens.length / blockTokens);
    this.hashes = {
      get blockCount() {
        return blockCount();
      },
      keyAt: (block: number) => hashOf(this.contentOf(block)),
    };
  }

  get tokenCount(): number {
    return this.tokens.length;
  }

  tokenIds(first: number, end: number): Int32Array {
    return Int32Array.from(this.tokens.slice(first, end));
  }

  contentOf(block: number): string {
    return this.#naive.keyOf(this.tokens, block + 1, this.extraKey);
  }
}

/** A cache, what its blocks hold, and the oracle, which learns from the events what came and what went. */
class Bench {
  readonly cache: PrefixCache;
  readonly naive = new NaivePrefixes(blockTokens);
  readonly content: string[] = [];
  readonly requests: FakeRequest[] = [];
  readonly holds: { letGo: () => void; blocks: number[]; contents: string[] }[] = [];
  readonly hitTokens: number[] = [];
  #count = 0;

  constructor(kind: 'blocks' | 'radix', blockCount: number) {
    const options = { blockCount, blockTokens, maxModelTokens: 1000, enableEvents: true };
    this.cache = kind === 'radix' ? new RadixCache(options) : new KvCacheManager(options);
  }

  admit(tokens: readonly number[], extraKey: string, share: number): void {
    const request = new FakeRequest(`r${this.#count++}`, tokens, extraKey, this.naive);
    const hit = this.cache.getComputedBlocks(request);
    const blocks = hit.blocks[0]!;
    expect(hit.tokens).toBe(this.naive.longest(tokens.slice(0, -1), extraKey) * blockTokens);
    expect(blocks.map((block) => this.content[block])).toEqual(blocks.map((_, i) => request.contentOf(i)));
    const count = Math.max(1, Math.floor((tokens.length - hit.tokens) * share));
    const before = this.cache.freeBlockCount;
    const held = this.cache.heldBlocks(hit);
    if (!this.cache.allocateSlots(request, count, { computed: hit, delayCacheBlocks: true })) {
      expect(this.cache.freeBlockCount).toBe(before);
      return;
    }
    expect(before - this.cache.freeBlockCount).toBe(Math.ceil((hit.tokens + count) / blockTokens) - held);
    request.computedTokens = hit.tokens;
    this.hitTokens.push(hit.tokens);
    this.requests.push(request);
    this.#compute(request, count);
  }

  /** The next tokens of a running request; generated ones when the prompt is computed. */
  advance(which: number, generated: number): void {
    const request = this.requests[which % this.requests.length];
    if (!request) return;
    if (request.computedTokens === request.tokenCount) request.tokens.push(generated);
    const count = request.tokenCount - request.computedTokens;
    if (this.cache.allocateSlots(request, count, { delayCacheBlocks: true })) this.#compute(request, count);
    else this.#release(request); // preempted
  }

  end(which: number): void {
    const request = this.requests[which % this.requests.length];
    if (request) this.#release(request);
  }

  hold(which: number): void {
    const request = this.requests[which % this.requests.length];
    if (!request) return;
    const full = Math.floor(request.computedTokens / blockTokens);
    const blocks = this.cache.blockTables(request.id)[0]!.slice(0, full);
    if (full === 0) return;
    const contents = blocks.map((_, i) => request.contentOf(i));
    this.holds.push({ letGo: this.cache.hold(blocks), blocks, contents });
  }

  letGo(which: number): void {
    const [hold] = this.holds.length > 0 ? this.holds.splice(which % this.holds.length, 1) : [];
    hold?.letGo();
  }

  /** Nothing that it has computed is found any more, before it goes on. */
  forget(which: number): void {
    const request = this.requests[which % this.requests.length];
    if (!request) return;
    const table = this.cache.blockTables(request.id);
    this.cache.forget(request, table);
    this.check();
    const found = this.cache.getComputedBlocks(request).blocks[0]!;
    expect(found.filter((block) => table[0]!.includes(block))).toEqual([]);
    expect(found.length).toBe(this.naive.longest(request.tokens.slice(0, -1), request.extraKey));
    // As it was at the first time: it may be that, or nobody else's.
    this.cache.forget(request, table);
    this.check();
    expect(this.cache.getComputedBlocks(request).blocks[0]).toEqual(found);
  }

  check(): void {
    for (const event of this.cache.takeEvents()) {
      if (event.type === 'AllBlocksCleared') this.naive.clear();
      else
        for (const hash of event.blockHashes)
          this.naive[event.type === 'BlockStored' ? 'add' : 'remove'](names.get(hash)!);
    }
    this.cache.checkIntegrity();
    for (const { blocks, contents } of this.holds) expect(blocks.map((block) => this.content[block])).toEqual(contents);
    for (const request of this.requests) {
      const table = this.cache.blockTables(request.id)[0]!.slice(0, Math.floor(request.computedTokens / blockTokens));
      expect(table.map((block) => this.content[block])).toEqual(table.map((_, i) => request.contentOf(i)));
    }
  }

  #compute(request: FakeRequest, count: number): void {
    const table = this.cache.blockTables(request.id)[0]!;
    const end = request.computedTokens + count;
    const first = Math.floor(request.computedTokens / blockTokens);
    for (let i = first; i * blockTokens < end; i++)
      this.content[table[i]!] = (i + 1) * blockTokens <= end ? request.contentOf(i) : 'partial';
    request.computedTokens = end;
    this.cache.cacheBlocks(request, end);
  }

  #release(request: FakeRequest): void {
    this.cache.free(request.id);
    this.requests.splice(this.requests.indexOf(request), 1);
  }
}

const tokens = fc.array(fc.nat({ max: 1 }), { minLength: 1, maxLength: 14, size: 'max' });
const operation = fc.oneof(
  {
    weight: 3,
    arbitrary: fc.record({
      type: fc.constant('admit' as const),
      tokens,
      extraKey: fc.constantFrom('', '', 'a'),
      share: fc.constantFrom(1, 1, 0.5),
    }),
  },
  {
    weight: 3,
    arbitrary: fc.record({ type: fc.constant('advance' as const), which: fc.nat(), token: fc.nat({ max: 1 }) }),
  },
  { weight: 2, arbitrary: fc.record({ type: fc.constant('end' as const), which: fc.nat() }) },
  { weight: 1, arbitrary: fc.record({ type: fc.constantFrom('hold' as const, 'letGo' as const), which: fc.nat() }) },
  { weight: 1, arbitrary: fc.record({ type: fc.constant('forget' as const), which: fc.nat() }) },
  { weight: 1, arbitrary: fc.record({ type: fc.constant('reset' as const) }) },
);

it('finds what the naive prefixes find, with either structure, on random schedules', () => {
  fc.assert(
    fc.property(
      fc.integer({ min: 8, max: 40 }),
      fc.array(operation, { maxLength: 28, size: 'max' }),
      (blockCount, operations) => {
        for (const bench of prefixCacheKinds.map((kind) => new Bench(kind, blockCount))) {
          for (const one of operations) {
            if (one.type === 'admit') bench.admit(one.tokens, one.extraKey, one.share);
            else if (one.type === 'advance') bench.advance(one.which, one.token);
            else if (one.type === 'reset') {
              const idle = bench.requests.length === 0 && bench.holds.length === 0;
              expect(bench.cache.resetPrefixCache()).toBe(idle);
            } else bench[one.type](one.which);
            bench.check();
          }
          while (bench.requests.length > 0) bench.end(0);
          while (bench.holds.length > 0) bench.letGo(0);
          bench.check();
          expect(bench.cache.freeBlockCount).toBe(blockCount - 1);
          expect(bench.cache.resetPrefixCache()).toBe(true);
          expect(bench.cache.cachedBlockCount).toBe(0);
        }
      },
    ),
    { numRuns: Number(process.env.KVTIER_PROPERTY_RUNS ?? 500) },
  );
}, 600_000);

it('finds the same with both structures while nothing has to go', () => {
  fc.assert(
    fc.property(fc.array(fc.record({ tokens, extraKey: fc.constantFrom('', 'a') }), { maxLength: 30 }), (requests) => {
      const [blocks, radix] = prefixCacheKinds.map((kind) => new Bench(kind, 1000));
      for (const bench of [blocks!, radix!]) {
        for (const one of requests) {
          bench.admit(one.tokens, one.extraKey, 1);
          bench.check();
        }
      }
      expect(radix!.hitTokens).toEqual(blocks!.hitTokens);
    }),
    { numRuns: 100 },
  );
});

it.each(prefixCacheKinds)(
  '%s: what was forgotten and computed anew stays, however often that is said of the old blocks',
  (kind) => {
    const bench = new Bench(kind, 30);
    const prompt = [0, 1, 0, 1, 1, 1];
    bench.admit([...prompt, 0], '', 1);
    const [first] = bench.requests;
    const suspects = bench.cache.blockTables(first!.id).map((table) => [...table]);
    bench.cache.forget(first!, suspects);
    bench.check();
    bench.admit([...prompt, 1, 1, 0], '', 1);
    bench.cache.forget(first!, suspects);
    bench.check();
    bench.admit([...prompt, 1, 1, 1], '', 1);
    expect(bench.hitTokens).toEqual([0, 0, 8]);
  },
);

describe('the radix cache', () => {
  it('exchanges blocks that another request entered first, and frees its own', () => {
    const bench = new Bench('radix', 20);
    const prompt = [1, 0, 1, 1, 0, 1];
    bench.admit(prompt, '', 0.2); // one token: nothing to find yet
    bench.admit(prompt, '', 1);
    bench.check();
    const second = [...bench.cache.blockTables('r1')[0]!];
    expect(bench.cache.freeBlockCount).toBe(19 - 1 - 3);
    bench.advance(0, 0);
    bench.check();
    expect(bench.cache.blockTables('r0')[0]).toEqual(second);
    expect(bench.cache.freeBlockCount).toBe(19 - 3);
  });

  it('counts a hit that would be evicted for the rest as demand', () => {
    const bench = new Bench('radix', 5);
    bench.admit([1, 1, 0, 0], '', 1);
    bench.end(0);
    bench.check();
    bench.admit([1, 1, 0, 0, 1, 1, 0, 0, 1], '', 1); // 5 blocks, 4 there are
    expect(bench.requests).toEqual([]);
    bench.check();
    bench.admit([1, 1, 0, 0, 1, 1, 0, 0], '', 1);
    expect(bench.hitTokens).toEqual([0, 4]);
  });

  it.each(radixPolicies)('evicts what was forgotten before all others: %s', (policy) => {
    const cache = new RadixCache({ blockCount: 13, blockTokens, maxModelTokens: 100, policy });
    const naive = new NaivePrefixes(blockTokens);
    const run = (id: string, tokens: readonly number[], priority = 0): void => {
      const request = Object.assign(new FakeRequest(id, tokens, '', naive), { priority });
      const hit = cache.getComputedBlocks(request);
      expect(cache.allocateSlots(request, tokens.length - hit.tokens, { computed: hit })).not.toBeNull();
    };
    for (const id of ['often', 'and', 'again']) run(id, [0, 0, 0, 1], 9);
    run('long', [0, 0, 1, 0, 1, 1, 0, 0, 1, 0], 9);
    const held = new FakeRequest('held', [0, 0, 0, 1, 1, 1], '', naive);
    run('held', held.tokens, 9);
    for (const id of ['often', 'and', 'again', 'long']) cache.free(id);
    cache.forget(held, cache.blockTables('held'));
    cache.free('held');
    // All of the pool: there is room for these, and for nothing that was before.
    const good = [0, 1, 2, 3].map((which) => [which, which, 0, 0, 1, 1]);
    for (const tokens of good) {
      run(`${tokens}`, tokens);
      cache.free(`${tokens}`);
    }
    const found = good.map((tokens) => cache.getComputedBlocks(new FakeRequest('?', [...tokens, 9], '', naive)).tokens);
    expect([found, cache.cachedBlockCount]).toEqual([[6, 6, 6, 6], 12]);
    cache.checkIntegrity();
  });

  it('with caching off finds nothing and frees all', () => {
    const cache = new RadixCache({ blockCount: 9, blockTokens, maxModelTokens: 100, enableCaching: false });
    const request = new FakeRequest('r', [1, 1, 0, 0], '', new NaivePrefixes(blockTokens));
    expect(cache.allocateSlots(request, 4)).toEqual([[1, 2]]);
    expect(cache.cachedBlockCount).toBe(0);
    cache.free('r');
    expect(cache.getComputedBlocks(request).tokens).toBe(0);
    expect(cache.freeBlockCount).toBe(8);
    cache.checkIntegrity();
  });
});
