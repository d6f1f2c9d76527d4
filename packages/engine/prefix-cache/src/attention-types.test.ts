/**
 * Random schedules over every kind of attention and mixes of them. After each operation the structures agree with each
 * other; each hit is the longest one that a naive search over the pool finds, and its blocks hold what they stand for;
 * each allocation takes what was asked of it; in the end everything is free again.
 */
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { type AttentionSpec, seesWholePrefix } from './attention-spec.ts';
import type { CacheHit } from './coordinator.ts';
import { KvCacheManager, type KvCacheManagerOptions } from './kv-cache-manager.ts';
import type { CacheRequest } from './request.ts';
import { keyOfTokens } from './testing/key-of-tokens.ts';

const full = (blockTokens: number): AttentionSpec => ({ kind: 'full_attention', blockTokens });
const windowOf = (blockTokens: number, windowTokens: number): AttentionSpec => ({
  kind: 'sliding_window',
  blockTokens,
  windowTokens,
});
const chunked = (blockTokens: number, chunkTokens: number): AttentionSpec => ({
  kind: 'chunked_local_attention',
  blockTokens,
  chunkTokens,
});
const rswa = (blockTokens: number, windowTokens: number): AttentionSpec => ({
  kind: 'rswa',
  blockTokens,
  windowTokens,
});
const mamba = (
  blockTokens: number,
  speculativeBlocks = 0,
  mode: 'none' | 'all' | 'align' = 'align',
): AttentionSpec => ({
  kind: 'mamba',
  blockTokens,
  mode,
  speculativeBlocks,
});

/** `KVTIER_PROPERTY_RUNS=10000` for the long run; seeds differ from run to run, and a failure prints its own. */
const propertyRuns = Number(process.env.KVTIER_PROPERTY_RUNS ?? 50);

interface Case {
  readonly groups: readonly AttentionSpec[];
  readonly options?: Partial<KvCacheManagerOptions>;
  /** Hits end on multiples of this; default: the largest block. */
  readonly alignTokens?: number;
}

const cases: Record<string, Case> = {
  full: { groups: [full(2)] },
  'full, latent': { groups: [{ kind: 'mla_attention', blockTokens: 2 }] },
  window: { groups: [windowOf(2, 5)] },
  chunked: { groups: [chunked(2, 6)] },
  'full and window': { groups: [full(2), windowOf(2, 4)] },
  'full and two windows': { groups: [full(2), windowOf(2, 3), windowOf(2, 7), windowOf(2, 3)] },
  'full and window of larger blocks': { groups: [full(2), windowOf(4, 6)] },
  'full of larger blocks and window': { groups: [full(4), windowOf(2, 6)] },
  'window and chunked': { groups: [windowOf(2, 5), chunked(2, 4)] },
  'full and states': { groups: [full(2), mamba(2)] },
  'full and states, all kept': { groups: [full(2), mamba(2, 1, 'all')] },
  'full and states, drafted ahead': { groups: [full(2), mamba(2, 2)] },
  'full, window and states': { groups: [full(2), windowOf(2, 5), mamba(4)], alignTokens: 2 },
  'full and states, hits inside blocks': { groups: [full(4), mamba(4)], options: { hashTokens: 2 }, alignTokens: 2 },
  'sparse: prompts only': { groups: [full(2), windowOf(2, 4)], options: { retentionIntervalTokens: 0 } },
  'sparse: every 8': { groups: [full(2), windowOf(2, 4), mamba(2)], options: { retentionIntervalTokens: 8 } },
  'draft model': { groups: [full(2)], options: { eagle: true } },
  'draft model, window': { groups: [windowOf(2, 5)], options: { eagle: true, prefillLookaheadTokens: 2 } },
  'draft model, hybrid': { groups: [full(2), windowOf(4, 6), windowOf(2, 3)], options: { eagle: [1] } },
  'draft model, all kinds': { groups: [full(2), windowOf(2, 6), mamba(2, 2)], options: { eagle: true } },
  'full and states, one each': { groups: [full(2), mamba(2, 0, 'none')] },
  'full and chunked': { groups: [full(2), chunked(2, 4)] },
  sink: { groups: [{ kind: 'sink_full_attention', blockTokens: 2, sinkTokens: 4 }] },
  'window over the answer': { groups: [rswa(2, 3)] },
  'window over the answer, and over all': { groups: [rswa(2, 5), windowOf(2, 4)] },
  'no duplicates': { groups: [full(2)], options: { dedupBlocks: true } },
  'no duplicates, window': { groups: [full(2), windowOf(2, 4)], options: { dedupBlocks: true } },
  'no duplicates, hits inside blocks': {
    groups: [full(4), mamba(4)],
    options: { hashTokens: 2, dedupBlocks: true },
    alignTokens: 2,
  },
  'lru as a policy': { groups: [full(2), windowOf(2, 4)], options: { evictionPolicy: 'lru' } },
  lfu: { groups: [full(2)], options: { evictionPolicy: 'lfu' } },
  fifo: { groups: [full(2), windowOf(2, 4)], options: { evictionPolicy: 'fifo' } },
  's3-fifo': { groups: [full(2), mamba(2)], options: { evictionPolicy: 's3-fifo' } },
  'cost-aware': { groups: [full(2), windowOf(2, 4)], options: { evictionPolicy: 'cost-aware' } },
  'two ranks': { groups: [full(2), mamba(4)], options: { contextParallel: 2 } },
};

/** The hash of a block stands for its prefix. */
class TestRequest implements CacheRequest {
  readonly id: string;
  readonly tokens: number[];
  readonly promptTokens: number;
  readonly hashTokens: number;
  computedTokens = 0;
  running = false;
  sharedPrefixBoundary = 0;

  constructor(id: string, tokens: readonly number[], hashTokens: number) {
    this.id = id;
    this.tokens = [...tokens];
    this.promptTokens = tokens.length;
    this.hashTokens = hashTokens;
  }

  get tokenCount(): number {
    return this.tokens.length;
  }

  get hashes() {
    const { tokens, hashTokens } = this;
    return {
      blockCount: Math.floor(tokens.length / hashTokens),
      keyAt: (block: number) => keyOfTokens(tokens.slice(0, (block + 1) * hashTokens)),
    };
  }
}

type Action =
  | { readonly do: 'admit'; readonly tokens: readonly number[]; readonly share: number; readonly external: number }
  | { readonly do: 'step'; readonly pick: number; readonly ahead: number }
  | { readonly do: 'free' | 'evict'; readonly pick: number };

const action: fc.Arbitrary<Action> = fc.oneof(
  {
    weight: 3,
    arbitrary: fc.record({
      do: fc.constant('admit' as const),
      tokens: fc.array(fc.integer({ min: 0, max: 1 }), { minLength: 1, maxLength: 20 }),
      share: fc.integer({ min: 1, max: 20 }),
      external: fc.constantFrom(0, 0, 0, 4, 8),
    }),
  },
  {
    weight: 6,
    arbitrary: fc.record({ do: fc.constant('step' as const), pick: fc.nat(20), ahead: fc.constantFrom(0, 0, 2) }),
  },
  { weight: 2, arbitrary: fc.record({ do: fc.constantFrom('free' as const, 'evict' as const), pick: fc.nat(20) }) },
);

class Schedule {
  readonly kv: KvCacheManager;
  readonly groups: readonly AttentionSpec[];
  readonly requests: TestRequest[] = [];
  readonly hashTokens: number;
  readonly alignTokens: number;
  readonly blockTokens: readonly number[];
  readonly usesEagle: boolean;
  readonly dedupBlocks: boolean;
  #nextId = 0;

  constructor({ groups, options = {}, alignTokens }: Case, blockCount: number) {
    this.groups = groups;
    const ranks = options.contextParallel ?? 1;
    this.blockTokens = groups.map((spec) => (spec.kind === 'mamba' ? spec.blockTokens : spec.blockTokens * ranks));
    this.hashTokens = options.hashTokens ?? Math.min(...this.blockTokens);
    this.alignTokens = alignTokens ?? Math.max(...this.blockTokens);
    this.usesEagle = options.eagle !== undefined;
    this.dedupBlocks = options.dedupBlocks ?? false;
    this.kv = new KvCacheManager({ blockCount, blockTokens: 2, maxModelTokens: 40, groups, ...options });
  }

  apply(one: Action): void {
    if (one.do === 'admit') this.#admit(one.tokens, one.share, one.external);
    else if (one.do === 'evict') this.kv.evictBlocks([one.pick % this.kv.blockCount]);
    else {
      const request = this.requests[one.pick % Math.max(this.requests.length, 1)];
      if (request && one.do === 'step') this.#step(request, one.ahead);
      else if (request) this.free(request);
    }
    for (const { source, target } of this.kv.takeBlockCopies()) this.kv.releaseBlocks([source, target]);
    this.kv.checkIntegrity();
    if (this.dedupBlocks) this.#checkDistinct();
  }

  /** No content is held twice, but states. */
  #checkDistinct(): void {
    const keys = this.kv.snapshot().keys.filter(({ group }) => this.groups[group]!.kind !== 'mamba');
    expect(new Set(keys.map(({ hash, group }) => `${group}:${hash}`)).size).toBe(keys.length);
  }

  free(request: TestRequest): void {
    this.kv.free(request.id);
    this.requests.splice(this.requests.indexOf(request), 1);
  }

  #admit(tokens: readonly number[], share: number, external: number): void {
    this.kv.newStepStarts();
    const request = new TestRequest(`r${this.#nextId++}`, tokens, this.hashTokens);
    const computed = this.kv.getComputedBlocks(request);
    this.#checkHit(request, computed);
    request.sharedPrefixBoundary = computed.sharedPrefixBoundary;
    const insideBlock = this.blockTokens.some((count) => computed.tokens % count !== 0);
    const loaded = insideBlock || computed.tokens + external >= tokens.length ? 0 : external;
    const start = computed.tokens + loaded;
    const count = Math.min(share, tokens.length - start);
    const options = { computed, externalComputedTokens: loaded, fullSequenceMustFit: true, ...this.#delayed };
    if (!this.kv.allocateSlots(request, count, options)) return;
    request.running = true;
    request.computedTokens = start + count;
    if (this.dedupBlocks) this.kv.cacheBlocks(request, request.computedTokens);
    this.requests.push(request);
    const tables = this.kv.blockTables(request.id);
    tables.forEach((table, group) => {
      expect(table.length).toBeGreaterThanOrEqual(Math.ceil(request.computedTokens / this.blockTokens[group]!));
    });
  }

  #step(request: TestRequest, ahead: number): void {
    this.kv.newStepStarts();
    if (request.computedTokens === request.tokenCount) request.tokens.push(request.tokenCount % 2);
    const count = request.tokenCount - request.computedTokens;
    const options = { lookaheadTokens: ahead, ...this.#delayed };
    const fits = request.tokenCount < 30 && this.kv.allocateSlots(request, count, options);
    if (fits) request.computedTokens += count;
    else this.free(request);
    if (fits && this.dedupBlocks) this.kv.cacheBlocks(request, request.computedTokens);
  }

  /** What de-duplication exchanges must be written: blocks are named after their step. */
  get #delayed() {
    return { delayCacheBlocks: this.dedupBlocks };
  }

  /** By trying every length, longest first. */
  #checkHit(request: TestRequest, hit: CacheHit): void {
    let longest = request.tokenCount - 1;
    const has = this.#holders();
    while (!this.groups.every((spec, group) => this.#holds(has, request, spec, group, longest))) longest--;
    // A draft model has the last block computed again: the hit is shorter than what is there.
    if (this.usesEagle) expect(hit.tokens).toBeLessThanOrEqual(longest);
    else expect(hit.tokens).toBe(longest);
    hit.blocks.forEach((blocks, group) => {
      const size = this.blockTokens[group]!;
      expect(blocks.length).toBe(Math.ceil(hit.tokens / size));
      blocks.forEach((block, i) => {
        if (block === 0) return;
        // A block that is hit in part may hold more of the same prefix.
        const ends = this.#ends(request, this.groups[group]!, i, hit.tokens, size);
        expect(ends.flatMap((end) => has.get(this.#key(request, group, end)) ?? [])).toContain(block);
      });
    });
  }

  #holds(
    has: ReadonlyMap<string, number[]>,
    request: TestRequest,
    spec: AttentionSpec,
    group: number,
    tokens: number,
  ): boolean {
    if (tokens === 0) return true;
    const size = this.blockTokens[group]!;
    if (tokens % this.alignTokens !== 0) return false;
    const first = {
      full_attention: 0,
      mla_attention: 0,
      sink_full_attention: 0,
      cross_attention: 0,
      sliding_window:
        spec.kind === 'sliding_window' ? Math.max(tokens / size - Math.ceil((spec.windowTokens - 1) / size), 0) : 0,
      chunked_local_attention:
        spec.kind === 'chunked_local_attention' ? Math.floor((tokens - (tokens % spec.chunkTokens)) / size) : 0,
      mamba: Math.ceil(tokens / size) - 1,
      rswa: 0,
    }[spec.kind];
    for (let i = first; i < Math.ceil(tokens / size); i++) {
      const ends = this.#ends(request, spec, i, tokens, size);
      if (!ends.some((end) => has.has(this.#key(request, group, end)))) return false;
    }
    return true;
  }

  /** Prefix lengths that block `i` of a hit may stand for: more than the hit if any prefix of the block will do. */
  #ends(request: TestRequest, spec: AttentionSpec, i: number, tokens: number, size: number): number[] {
    const end = Math.min((i + 1) * size, tokens);
    if (!seesWholePrefix(spec)) return [end];
    const ends: number[] = [];
    const last = Math.min((i + 1) * size, request.tokenCount - 1);
    for (let one = end; one <= last; one += this.hashTokens) ends.push(one);
    return ends;
  }

  #key(request: TestRequest, group: number, tokens: number): string {
    return `${group}:${keyOfTokens(request.tokens.slice(0, tokens))}`;
  }

  #holders(): Map<string, number[]> {
    const has = new Map<string, number[]>();
    for (const { block, hash, group } of this.kv.snapshot().keys)
      has.set(`${group}:${hash}`, [...(has.get(`${group}:${hash}`) ?? []), block]);
    return has;
  }
}

const manager = (groups: readonly AttentionSpec[], options: Partial<KvCacheManagerOptions> = {}) =>
  new KvCacheManager({ blockCount: 20, blockTokens: 2, maxModelTokens: 40, groups, ...options });

const tokens = (count: number): number[] => Array.from({ length: count }, (_, i) => i);

describe('attention types', () => {
  it('lets go of what the window has passed, and finds the window again', () => {
    const kv = manager([windowOf(2, 4)]);
    const request = new TestRequest('r', tokens(9), 2);
    kv.allocateSlots(request, 8);
    request.computedTokens = 8;
    request.running = true;
    kv.allocateSlots(request, 1);
    expect(kv.blockTables('r')).toEqual([[0, 0, 3, 4, 5]]);
    kv.free('r');
    expect(kv.getComputedBlocks(new TestRequest('s', tokens(9), 2))).toMatchObject({
      blocks: [[0, 0, 3, 4]],
      tokens: 8,
    });
  });

  it('takes the blocks of the encoder’s input once, and none as the answer grows', () => {
    const kv = manager([{ kind: 'cross_attention', blockTokens: 2 }], { enableCaching: false });
    const request = new TestRequest('r', tokens(3), 2);
    expect(kv.allocateSlots(request, 3, { encoderTokens: 7 })).toEqual([[1, 2, 3, 4]]);
    request.computedTokens = 3;
    expect(kv.allocateSlots(request, 9, { encoderTokens: 7 })).toEqual([[]]);
    kv.free('r');
    expect(kv.freeBlockCount).toBe(19);
  });

  it('keeps the blocks of the sink for itself', () => {
    const kv = manager([{ kind: 'sink_full_attention', blockTokens: 2, sinkTokens: 4 }]);
    expect(kv.freeBlockCount).toBe(17);
    expect(kv.allocateSlots(new TestRequest('r', tokens(3), 2), 3)).toEqual([[3, 4]]);
    kv.free('r');
    expect(kv.freeBlockCount).toBe(17);
    expect(kv.resetPrefixCache()).toBe(true);
  });

  it('copies a block before it writes behind a hit that ends inside', () => {
    const kv = manager([full(4), mamba(4)], { hashTokens: 2 });
    const first = new TestRequest('first', tokens(3), 2);
    kv.allocateSlots(first, 2);
    kv.newStepStarts();
    const second = new TestRequest('second', tokens(5), 2);
    const computed = kv.getComputedBlocks(second);
    expect(computed).toMatchObject({ blocks: [[1], [2]], tokens: 2 });
    expect(kv.allocateSlots(second, 2, { computed })).toEqual([[3], [4]]);
    expect(kv.takeBlockCopies()).toEqual([
      { source: 1, target: 3 },
      { source: 2, target: 4 },
    ]);
    expect(kv.takeBlockCopies()).toEqual([]);
  });

  it('makes a request wait for a state that is only written in this step', () => {
    const kv = manager([full(2), mamba(2)]);
    kv.allocateSlots(new TestRequest('first', tokens(4), 2), 4);
    const second = new TestRequest('second', tokens(6), 2);
    const computed = kv.getComputedBlocks(second);
    expect(computed.tokens).toBe(4);
    expect(kv.allocateSlots(second, 2, { computed })).toBeNull();
    kv.newStepStarts();
    expect(kv.allocateSlots(second, 2, { computed })).not.toBeNull();
  });

  it.each<[string, readonly AttentionSpec[], Partial<KvCacheManagerOptions>]>([
    ['cross attention cannot be cached', [{ kind: 'cross_attention', blockTokens: 2 }], {}],
    ['not whole hashes of 4', [full(2)], { hashTokens: 4 }],
    ['no multiple of blocks of 4', [full(2), windowOf(4, 4)], { schedulerTokens: 2 }],
    ['context parallelism works with', [full(2), windowOf(2, 4)], { contextParallel: 2 }],
    ['chunked local attention has no draft models', [chunked(2, 4)], { eagle: true }],
    ['must have schedulerTokens (4)', [full(4), chunked(2, 4)], {}],
    ['make them one group', [full(2), full(2)], {}],
    ['needs a group with a window or states', [full(2)], { retentionIntervalTokens: 4 }],
    ['no multiple of schedulerTokens (4)', [full(4), windowOf(2, 4)], { retentionIntervalTokens: 6 }],
    ['windowTokens 0', [windowOf(2, 0)], {}],
  ])('refuses: %s', (message, groups, options) => {
    expect(() => manager(groups, options)).toThrow(expect.objectContaining({ code: 'CONFIG' }));
    expect(() => manager(groups, options)).toThrow(message);
  });
});

describe.each(Object.entries(cases))('%s', (_name, one) => {
  it('keeps its invariants and finds the longest hit, on random schedules', () => {
    fc.assert(
      fc.property(fc.integer({ min: 8, max: 60 }), fc.array(action, { maxLength: 60 }), (blockCount, actions) => {
        const schedule = new Schedule(one, blockCount);
        const { freeBlockCount, usage } = schedule.kv;
        for (const each of actions) schedule.apply(each);
        for (const request of [...schedule.requests]) schedule.free(request);
        expect([schedule.kv.freeBlockCount, schedule.kv.usage]).toEqual([freeBlockCount, usage]);
        expect(schedule.kv.resetPrefixCache()).toBe(true);
        expect(schedule.kv.cachedBlockCount).toBe(0);
      }),
      { numRuns: propertyRuns },
    );
  }, 600_000);
});
