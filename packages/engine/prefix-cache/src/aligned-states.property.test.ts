/**
 * Admission where attention meets states that are kept per block (Mamba, `align`) and hits may end inside a block: against
 * vLLM's own counts, written down naively here, in pools that are too small for all.
 */
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { KvCacheManager } from './index.ts';
import { TokenRequest } from './testing/token-request.ts';

interface Setting {
  readonly blockTokens: number;
  readonly hashTokens: number;
  readonly speculative: number;
}

/** What vLLM's managers remember besides their tables. */
class Oracle {
  readonly #kv: KvCacheManager;
  readonly #setting: Setting;
  readonly #running = new Set<string>();
  /** Registered at the end of their prompt, inside a block, and not gone on since. */
  readonly #tails = new Set<string>();
  readonly #cachedThisStep = new Set<string>();

  constructor(kv: KvCacheManager, setting: Setting) {
    this.#kv = kv;
    this.#setting = setting;
  }

  /** Blocks that vLLM asks for, and those that it then takes from the free queue: where drafts were refused, these are more. */
  demand(request: TokenRequest, hit: readonly (readonly number[])[], end: number): { asked: number; taken: number } {
    const { blockTokens, speculative } = this.#setting;
    const { refs, cachedHash } = this.#kv.snapshot();
    const free = (column: readonly number[]) => column.filter((block) => block !== 0 && !refs.has(block)).length;
    const [table, states] = this.#tables(request.id) as [number[], number[]];
    const isInside = hit[0]!.length > 0 && request.computedTokens % blockTokens !== 0;
    const required = Math.ceil(end / blockTokens);
    let full = Math.max(required - table.length - hit[0]!.length, 0) + free(hit[0]!);
    if (isInside) full++;

    const last = hit[1]!.at(-1);
    const hash = last === undefined ? undefined : cachedHash(last);
    if (hash !== undefined && this.#cachedThisStep.has(hash)) return { asked: Infinity, taken: Infinity };
    const isPartial = isInside || this.#tails.has(request.id);
    let fresh = required + speculative - hit[1]!.length - states.length;
    const unused = Math.max(-fresh, 0);
    if (isPartial) fresh = Math.max(fresh, 0) + 1;
    if (fresh > 0) fresh = 1 + (this.#running.has(request.id) ? 0 : speculative) + (isPartial ? 1 : 0);
    const asked = full + fresh + free(hit[1]!);
    return { asked, taken: isPartial ? asked : asked + unused };
  }

  admitted(request: TokenRequest, end: number, before: ReadonlySet<string>): void {
    const { blockTokens, hashTokens } = this.#setting;
    this.#running.add(request.id);
    this.#tails.delete(request.id);
    const tokens = Math.min(end, request.tokenCount);
    const boundary = request.promptTokens - (request.promptTokens % hashTokens);
    if (tokens === boundary && tokens % blockTokens !== 0) this.#tails.add(request.id);
    for (const pair of this.hashes())
      if (!before.has(pair)) this.#cachedThisStep.add(pair.slice(pair.indexOf(' ') + 1));
  }

  gone(id: string): void {
    this.#running.delete(id);
    this.#tails.delete(id);
  }

  stepStarts(): void {
    this.#cachedThisStep.clear();
  }

  /**
   * Blocks of states that are held or hit and their hashes, as words. A free block that is found again does not count: it may be
   * taken anew, and be registered under its old hash once more.
   */
  hashes(hit: readonly number[] = []): Set<string> {
    const { hashed, refs } = this.#kv.snapshot();
    const stay = hashed.filter(({ group, block }) => group === 1 && (refs.has(block) || hit.includes(block)));
    return new Set(stay.map(({ block, hash }) => `${block} ${hash}`));
  }

  #tables(id: string): readonly (readonly number[])[] {
    const tables = this.#kv.blockTables(id);
    return tables.length === 0 ? [[], []] : tables;
  }
}

const action = fc.oneof(
  { weight: 4, arbitrary: fc.record({ kind: fc.constant('come' as const), shared: fc.nat(30), own: fc.nat(9) }) },
  {
    weight: 10,
    arbitrary: fc.record({
      kind: fc.constant('go' as const),
      which: fc.nat(5),
      tokens: fc.integer({ min: 1, max: 17 }),
    }),
  },
  { weight: 4, arbitrary: fc.record({ kind: fc.constant('step' as const) }) },
  { weight: 2, arbitrary: fc.record({ kind: fc.constant('leave' as const), which: fc.nat(5), popped: fc.boolean() }) },
  { weight: 1, arbitrary: fc.record({ kind: fc.constant('evict' as const), block: fc.integer({ min: 1, max: 9 }) }) },
);

const schedule = fc.array(action, { minLength: 40, maxLength: 100, size: 'max' });

describe.each<[string, Setting]>([
  ['hashes of 4 in blocks of 8', { blockTokens: 8, hashTokens: 4, speculative: 0 }],
  ['hashes of 4 in blocks of 16', { blockTokens: 16, hashTokens: 4, speculative: 0 }],
  ['hashes of 16 in blocks of 16', { blockTokens: 16, hashTokens: 16, speculative: 0 }],
  ['hashes of 4 in blocks of 8, 2 drafts', { blockTokens: 8, hashTokens: 4, speculative: 2 }],
])('%s', (_name, setting) => {
  it('admits whom the original admits, and takes no more than was asked for', { timeout: 60_000 }, () => {
    const { blockTokens, hashTokens, speculative } = setting;
    let refused = 0;
    fc.assert(
      fc.property(fc.integer({ min: 6, max: 12 }), schedule, (blockCount, actions) => {
        const kv = new KvCacheManager({
          blockCount,
          blockTokens,
          hashTokens,
          maxModelTokens: 96,
          groups: [
            { kind: 'full_attention', blockTokens },
            { kind: 'mamba', blockTokens, mode: 'align', speculativeBlocks: speculative },
          ],
        });
        const oracle = new Oracle(kv, setting);
        const requests: TokenRequest[] = [];
        let born = 0;
        for (const one of actions) {
          if (one.kind === 'come') {
            const id = `r${born++}`;
            const own = Array.from({ length: one.own + 1 }, (_, i) => 1_000 * born + i);
            const shared = Array.from({ length: one.shared }, (_, i) => i);
            requests.push(new TokenRequest(id, [...shared, ...own], hashTokens));
          } else if (one.kind === 'step') {
            kv.newStepStarts();
            oracle.stepStarts();
            kv.releaseBlocks(kv.takeBlockCopies().flatMap(({ source, target }) => [source, target]));
          } else if (one.kind === 'evict') {
            if (one.block < blockCount) kv.evictBlocks([one.block]);
          } else if (requests.length > 0) {
            const request = requests[one.which % requests.length]!;
            if (one.kind === 'go') go(kv, oracle, request, one.tokens);
            else {
              if (one.popped) kv.releaseBlocks(kv.popBlocksForFree(request.id).reverse());
              else kv.free(request.id);
              oracle.gone(request.id);
              requests.splice(requests.indexOf(request), 1);
            }
          }
          kv.checkIntegrity();
        }
      }),
      { numRuns: 100 },
    );
    expect(refused).toBeGreaterThan(50);

    function go(kv: KvCacheManager, oracle: Oracle, request: TokenRequest, wanted: number): void {
      const isNew = !request.running;
      const hit = isNew ? kv.getComputedBlocks(request) : undefined;
      request.computedTokens = hit?.tokens ?? request.computedTokens;
      // A prompt goes on in parts; an answer by one token, and drafts of which the last is refused.
      const left = request.tokenCount - request.computedTokens;
      if (left === 0) request.tokens.push(5_000 + request.tokenCount);
      const toBoundary = request.promptTokens - (request.promptTokens % hashTokens) - request.computedTokens;
      const part = wanted % 2 === 0 && toBoundary > 0 ? toBoundary : wanted;
      const tokens = left > 1 ? Math.min(part, left) : 1 + (wanted % (speculative + 1));
      const end = Math.min(request.computedTokens + tokens, 96);
      if (end <= request.computedTokens) return;
      kv.removeSkippedBlocks(request, request.computedTokens);
      const { asked, taken } = oracle.demand(request, hit?.blocks ?? [[], []], end);
      const free = kv.freeBlockCount;
      const before = oracle.hashes(hit?.blocks[1]);
      const computed = request.computedTokens;
      if (isNew) request.computedTokens = 0;
      const added = kv.allocateSlots(request, end - computed, hit ? { computed: hit } : {});
      request.computedTokens = computed;
      expect(added === null, `${request.id} to ${end}: ${asked} of ${free}`).toBe(asked > free || taken > free);
      if (added === null) {
        refused++;
        if (isNew) request.computedTokens = 0;
        return;
      }
      expect(free - kv.freeBlockCount).toBeLessThanOrEqual(Math.max(asked, taken));
      oracle.admitted(request, end, before);
      request.running = true;
      request.computedTokens = Math.min(end, request.tokenCount);
    }
  });
});
