/**
 * Random schedules against a naive model: arrays that are searched, no links, no index. Everything visible must be
 * equal after every operation; and the rules that readers look for first, one by one.
 */
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import type { KvCacheEvent } from './events.ts';
import { KvCacheManager } from './kv-cache-manager.ts';
import type { CacheRequest } from './request.ts';
import { keyOfTokens } from './testing/key-of-tokens.ts';

const blockTokens = 2;

/** The hash of a block stands for its prefix. */
class TestRequest implements CacheRequest {
  readonly id: string;
  readonly tokens: number[];
  computedTokens = 0;
  running = false;

  constructor(id: string, tokens: readonly number[]) {
    this.id = id;
    this.tokens = [...tokens];
  }

  get tokenCount(): number {
    return this.tokens.length;
  }

  get hashes() {
    const { tokens } = this;
    return {
      blockCount: Math.floor(tokens.length / blockTokens),
      keyAt: (block: number) => keyOfTokens(tokens.slice(0, (block + 1) * blockTokens)),
    };
  }
}

interface NaiveBlock {
  readonly id: number;
  refs: number;
  hash: string | undefined;
  /** When it got its hash: of several with one hash, the oldest answers. */
  hashedAt: number;
}

/** What the manager must do, written down as simply as possible. */
class NaiveManager {
  readonly blocks: NaiveBlock[];
  free: NaiveBlock[];
  readonly tables = new Map<string, { blocks: NaiveBlock[]; cached: number }>();
  #clock = 0;

  constructor(blockCount: number) {
    this.blocks = Array.from({ length: blockCount }, (_, id) => ({ id, refs: 0, hash: undefined, hashedAt: 0 }));
    this.free = this.blocks.slice(1);
  }

  hit(request: TestRequest): NaiveBlock[] {
    const found: NaiveBlock[] = [];
    for (let end = blockTokens; end <= request.tokenCount - 1; end += blockTokens) {
      const hash = keyOfTokens(request.tokens.slice(0, end));
      const holders = this.blocks.filter((block) => block.hash === hash).sort((a, b) => a.hashedAt - b.hashedAt);
      if (!holders[0]) break;
      found.push(holders[0]);
    }
    return found;
  }

  /** Returns the ids added for the step's own tokens, or null. */
  allocate(request: TestRequest, hit: NaiveBlock[], external: number, count: number, delay: boolean): number[] | null {
    const known = this.tables.get(request.id) ?? { blocks: [], cached: hit.length };
    const start = request.computedTokens + hit.length * blockTokens + external;
    const blocksFor = (tokens: number) => Math.ceil(tokens / blockTokens);
    const need = Math.max(blocksFor(start + count) - known.blocks.length - hit.length, 0);
    if (need + hit.filter((block) => block.refs === 0).length > this.free.length) return null;
    for (const block of hit) {
      block.refs++;
      this.free = this.free.filter((other) => other !== block);
    }
    known.blocks.push(...hit);
    const beforeStep = external > 0 ? blocksFor(start) : 0;
    const added: number[] = [];
    for (let i = 0; i < need; i++) {
      const block = this.free.shift()!;
      block.refs = 1;
      block.hash = undefined;
      known.blocks.push(block);
      if (known.blocks.length > beforeStep) added.push(block.id);
    }
    this.tables.set(request.id, known);
    if (!delay) this.cache(request, Math.min(start + count, request.tokenCount));
    return added;
  }

  cache(request: TestRequest, tokens: number): void {
    const table = this.tables.get(request.id)!;
    for (; (table.cached + 1) * blockTokens <= tokens; table.cached++) {
      const block = table.blocks[table.cached]!;
      block.hash = keyOfTokens(request.tokens.slice(0, (table.cached + 1) * blockTokens));
      block.hashedAt = ++this.#clock;
    }
  }

  release(blocks: NaiveBlock[]): void {
    for (const block of blocks) block.refs--;
    const gone = blocks.filter((block) => block.refs === 0);
    const unhashed = gone.filter((block) => block.hash === undefined);
    this.free = [...unhashed, ...this.free, ...gone.filter((block) => block.hash !== undefined)];
  }

  freeRequest(id: string): void {
    const table = this.tables.get(id);
    this.tables.delete(id);
    if (table) this.release(table.blocks.reverse());
  }
}

type Action =
  | { kind: 'new'; tokens: number[]; external: number; count: number; delay: boolean }
  | { kind: 'step'; pick: number; count: number; token: number; delay: boolean }
  | { kind: 'free' | 'preempt'; pick: number }
  | { kind: 'hold'; pick: number; length: number }
  | { kind: 'unhold' }
  | { kind: 'evict'; block: number }
  | { kind: 'reset' };

const small = fc.nat({ max: 1000 });
const action: fc.Arbitrary<Action> = fc.oneof(
  {
    weight: 4,
    arbitrary: fc.record({
      kind: fc.constant('new' as const),
      tokens: fc.array(fc.nat({ max: 1 }), { minLength: 1, maxLength: 14 }),
      external: fc.oneof(fc.constant(0), fc.nat({ max: 3 })),
      count: fc.nat({ max: 12 }),
      delay: fc.boolean(),
    }),
  },
  {
    weight: 6,
    arbitrary: fc.record({
      kind: fc.constant('step' as const),
      pick: small,
      count: fc.integer({ min: 1, max: 6 }),
      token: fc.nat({ max: 1 }),
      delay: fc.boolean(),
    }),
  },
  { weight: 2, arbitrary: fc.record({ kind: fc.constantFrom('free' as const, 'preempt' as const), pick: small }) },
  { weight: 1, arbitrary: fc.record({ kind: fc.constant('hold' as const), pick: small, length: small }) },
  { weight: 1, arbitrary: fc.constant({ kind: 'unhold' as const }) },
  { weight: 1, arbitrary: fc.record({ kind: fc.constant('evict' as const), block: fc.integer({ min: 1, max: 11 }) }) },
  { weight: 1, arbitrary: fc.constant({ kind: 'reset' as const }) },
);

/** Both managers side by side. */
class Pair {
  readonly real: KvCacheManager;
  readonly naive: NaiveManager;
  readonly requests = new Map<string, TestRequest>();
  readonly holds: number[][] = [];
  #ids = 0;

  constructor(blockCount: number) {
    this.real = new KvCacheManager({ blockCount, blockTokens, maxModelTokens: 1000, enableEvents: true });
    this.naive = new NaiveManager(blockCount);
  }

  apply(action: Action): void {
    const running = [...this.requests.values()].filter((request) => request.running);
    switch (action.kind) {
      case 'new':
        this.#admit(new TestRequest(`r${this.#ids++}`, action.tokens), action);
        return;
      case 'step': {
        const request = running[action.pick % running.length];
        if (!request) return;
        if (request.computedTokens === request.tokenCount) request.tokens.push(action.token);
        const count = Math.min(action.count, request.tokenCount - request.computedTokens);
        const naive = this.naive.allocate(request, [], 0, count, action.delay);
        const real = this.real.allocateSlots(request, count, { delayCacheBlocks: action.delay });
        expect(real).toEqual(naive && [naive]);
        if (naive) this.#computed(request, request.computedTokens + count, action.delay);
        return;
      }
      case 'free':
      case 'preempt': {
        const request = running[action.pick % running.length];
        if (!request) return;
        this.real.free(request.id);
        this.naive.freeRequest(request.id);
        this.requests.delete(request.id);
        if (action.kind === 'preempt') {
          const again = new TestRequest(request.id, request.tokens);
          this.#admit(again, { external: 0, count: again.tokenCount, delay: false });
        }
        return;
      }
      case 'hold': {
        const request = running[action.pick % running.length];
        if (!request) return;
        const table = this.real.blockTables(request.id)[0]!;
        const blocks = table.slice(0, action.length % (table.length + 1));
        this.real.holdBlocks(blocks);
        for (const block of blocks) this.naive.blocks[block]!.refs++;
        this.holds.push(blocks);
        return;
      }
      case 'unhold': {
        const blocks = this.holds.pop();
        if (!blocks) return;
        this.real.releaseBlocks(blocks);
        this.naive.release(blocks.map((block) => this.naive.blocks[block]!));
        return;
      }
      case 'evict':
        if (action.block >= this.real.blockCount) return;
        this.real.evictBlocks([action.block]);
        this.naive.blocks[action.block]!.hash = undefined;
        return;
      case 'reset': {
        const idle = this.naive.free.length === this.naive.blocks.length - 1;
        expect(this.real.resetPrefixCache()).toBe(idle);
        if (idle) for (const block of this.naive.blocks) block.hash = undefined;
        return;
      }
    }
  }

  compare(): void {
    this.real.checkIntegrity();
    const pool = this.real.snapshot();
    const held = this.naive.blocks.filter((block) => block.refs > 0);
    const hashed = this.naive.blocks.filter((block) => block.hash !== undefined);
    expect(pool.free).toEqual(this.naive.free.map((block) => block.id));
    expect(Object.fromEntries(pool.refs)).toEqual(Object.fromEntries(held.map((block) => [block.id, block.refs])));
    expect(pool.hashed.map(({ block, hash }) => [block, hash])).toEqual(hashed.map(({ id, hash }) => [id, hash]));
    expect(this.real.cachedBlockCount).toBe(new Set(hashed.map((block) => block.hash)).size);
    for (const [id, table] of this.naive.tables)
      expect(this.real.blockTables(id)[0]).toEqual(table.blocks.map((block) => block.id));
  }

  #admit(request: TestRequest, options: { external: number; count: number; delay: boolean }): void {
    const naiveHit = this.naive.hit(request);
    const computed = this.real.getComputedBlocks(request);
    expect(computed.blocks).toEqual([naiveHit.map((block) => block.id)]);
    const rest = request.tokenCount - computed.tokens;
    const external = Math.min(options.external * blockTokens, Math.floor((rest - 1) / blockTokens) * blockTokens);
    const count = Math.max(Math.min(options.count, rest - external), external > 0 ? 0 : 1);
    const naive = this.naive.allocate(request, naiveHit, external, count, options.delay);
    const real = this.real.allocateSlots(request, count, {
      computed,
      externalComputedTokens: external,
      delayCacheBlocks: options.delay,
      hasScheduledRequests: false,
    });
    expect(real).toEqual(naive && [naive]);
    if (!naive) return;
    request.running = true;
    this.requests.set(request.id, request);
    this.#computed(request, computed.tokens + external + count, options.delay);
  }

  #computed(request: TestRequest, tokens: number, delayed: boolean): void {
    request.computedTokens = tokens;
    if (!delayed) return;
    this.real.cacheBlocks(request, tokens);
    this.naive.cache(request, tokens);
  }
}

/** Events alone must be enough to know how many blocks carry each hash. */
function follow(held: Map<string, number>, events: readonly KvCacheEvent[]): void {
  for (const event of events) {
    if (event.type === 'AllBlocksCleared') held.clear();
    else
      for (const hash of event.blockHashes) {
        const count = (held.get(hash) ?? 0) + (event.type === 'BlockStored' ? 1 : -1);
        if (count === 0) held.delete(hash);
        else held.set(hash, count);
      }
  }
}

describe('KV-cache manager', () => {
  it('does what the naive model does, on random schedules', () => {
    fc.assert(
      fc.property(fc.integer({ min: 2, max: 12 }), fc.array(action, { maxLength: 80 }), (blockCount, actions) => {
        const pair = new Pair(blockCount);
        const held = new Map<string, number>();
        for (const one of actions) {
          pair.apply(one);
          pair.compare();
          follow(held, pair.real.takeEvents());
        }
        const counts = new Map<string, number>();
        for (const { hash } of pair.real.snapshot().hashed) counts.set(hash, (counts.get(hash) ?? 0) + 1);
        expect(held).toEqual(counts);
        for (const id of pair.requests.keys()) pair.real.free(id);
        for (const blocks of pair.holds) pair.real.releaseBlocks(blocks);
        expect(pair.real.freeBlockCount).toBe(blockCount - 1);
      }),
      { numRuns: Number(process.env.KVTIER_PROPERTY_RUNS ?? 400) },
    );
  }, 600_000);

  const manager = (blockCount: number, options: { watermark?: number; enableCaching?: boolean } = {}) =>
    new KvCacheManager({ blockCount, blockTokens, maxModelTokens: 100, ...options });

  /** Admit a request and compute all of it. */
  function compute(kv: KvCacheManager, id: string, tokens: readonly number[]): TestRequest {
    const request = new TestRequest(id, tokens);
    const computed = kv.getComputedBlocks(request);
    expect(kv.allocateSlots(request, request.tokenCount - computed.tokens, { computed })).not.toBeNull();
    request.computedTokens = request.tokenCount;
    request.running = true;
    return request;
  }

  it('recomputes the last block of a full hit, into a block of its own', () => {
    const kv = manager(10);
    compute(kv, 'first', [1, 2, 3, 4]);
    const second = new TestRequest('second', [1, 2, 3, 4]);
    expect(kv.getComputedBlocks(second)).toEqual({ blocks: [[1]], tokens: 2, sharedPrefixBoundary: 0 });
    compute(kv, 'second', [1, 2, 3, 4]);
    expect(kv.blockTables('second')).toEqual([[1, 3]]);
    // The duplicate keeps the hash alive when the first copy is forgotten.
    kv.evictBlocks([2]);
    expect(kv.getComputedBlocks(new TestRequest('third', [1, 2, 3, 4, 5])).blocks).toEqual([[1, 3]]);
  });

  it('reuses the tail of a freed chain first, and blocks without a hash before all others', () => {
    const kv = manager(5);
    compute(kv, 'r', [1, 2, 3, 4, 5]);
    kv.free('r');
    expect(kv.snapshot().free).toEqual([3, 4, 2, 1]);
  });

  it('leaves everything as it was when an allocation does not fit', () => {
    const kv = manager(4);
    compute(kv, 'a', [1, 2, 3]);
    kv.free('a');
    compute(kv, 'b', [9, 9]);
    const before = kv.snapshot();
    const c = new TestRequest('c', [1, 2, 3, 4, 5, 6, 7]);
    expect(kv.allocateSlots(c, 5, { computed: kv.getComputedBlocks(c) })).toBeNull();
    expect(kv.snapshot().free).toEqual(before.free);
    expect(kv.blockTables('c')).toEqual([[]]);
  });

  it('counts a hit on a free block as demand', () => {
    const kv = manager(3);
    compute(kv, 'a', [1, 2, 3, 4]);
    kv.free('a');
    const b = new TestRequest('b', [1, 2, 7, 8, 9]);
    // One block is the hit, two more are needed, two are free in all.
    expect(kv.allocateSlots(b, 3, { computed: kv.getComputedBlocks(b) })).toBeNull();
  });

  it('keeps loaded blocks from being found until they are cached', () => {
    const kv = manager(10);
    const loading = new TestRequest('loading', [1, 2, 3, 4, 5]);
    const options = { externalComputedTokens: 4, delayCacheBlocks: true };
    expect(kv.allocateSlots(loading, 0, options)).toEqual([[]]);
    expect(kv.blockTables('loading')).toEqual([[1, 2]]);
    const other = new TestRequest('other', [1, 2, 3, 4, 5]);
    expect(kv.getComputedBlocks(other).tokens).toBe(0);
    kv.cacheBlocks(loading, 2);
    expect(kv.getComputedBlocks(other).blocks).toEqual([[1]]);
  });

  it('leaves the watermark free at admission, and not for those that run', () => {
    const kv = manager(11, { watermark: 0.2 });
    const a = compute(kv, 'a', [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]);
    const b = new TestRequest('b', [50, 51, 52, 53]);
    expect(kv.allocateSlots(b, 4)).toBeNull();
    expect(kv.allocateSlots(b, 4, { hasScheduledRequests: false })).toEqual([[8, 9]]);
    a.tokens.push(15);
    expect(kv.allocateSlots(a, 1)).toEqual([[10]]);
  });

  it('keeps room that is promised to others', () => {
    const kv = manager(5);
    const request = new TestRequest('r', [1, 2, 3, 4]);
    expect(kv.allocateSlots(request, 4, { reservedBlocks: 3 })).toBeNull();
    expect(kv.allocateSlots(request, 2, { fullSequenceMustFit: true, reservedBlocks: 3 })).toEqual([[1]]);
  });

  it('refuses a reset while a block is held', () => {
    const kv = manager(5);
    compute(kv, 'r', [1, 2, 3]);
    expect(kv.resetPrefixCache()).toBe(false);
    kv.free('r');
    expect(kv.cachedBlockCount).toBe(1);
    expect(kv.resetPrefixCache()).toBe(true);
    expect(kv.cachedBlockCount).toBe(0);
    expect(kv.usage).toBe(0);
  });

  it('finds nothing and keeps nothing with caching off', () => {
    const kv = manager(5, { enableCaching: false });
    compute(kv, 'r', [1, 2, 3, 4]);
    kv.free('r');
    expect(kv.getComputedBlocks(new TestRequest('s', [1, 2, 3, 4])).tokens).toBe(0);
    expect(kv.snapshot().hashed).toEqual([]);
  });

  it('tells each lookup once, those of preempted requests apart', () => {
    const kv = manager(5);
    kv.recordLookup(10, 4, false);
    kv.recordLookup(12, 8, true);
    expect(kv.takeStats()).toMatchObject({ requests: 1, queriedTokens: 10, hitTokens: 4, preemptedHitTokens: 8 });
    expect(kv.takeStats()).toMatchObject({ requests: 0, preemptedRequests: 0 });
  });
});
