import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { decideSplit, type SplitFigures } from './decision.ts';

const limits = { minUncachedTokens: 512, patience: 1, prefillMs: 30_000 };
const idle = { aheadS: 0, prefillTokensPerS: 1_000 };
const figures = (part: Partial<SplitFigures> = {}): SplitFigures => ({
  tokens: 4_000,
  uncachedTokens: 2_000,
  decode: { ...idle, running: 0 },
  prefill: idle,
  ...part,
});

describe('a prompt is split', () => {
  it.each<[string, SplitFigures, string, string]>([
    ['where both are idle', figures(), 'worth', '2000 of 4000 tokens uncached, there 2000 ms, here 2000 ms'],
    ['not for a short rest', figures({ uncachedTokens: 511 }), 'short', '511 of 4000 tokens uncached, below 512'],
    [
      'not without a pod',
      figures({ prefill: undefined }),
      'nobody',
      '2000 of 4000 tokens uncached, no prefill pod takes requests',
    ],
    [
      'not behind a queue',
      figures({ prefill: { ...idle, aheadS: 0.5 } }),
      'busy',
      '2000 of 4000 tokens uncached, there 2500 ms, here 2000 ms',
    ],
    [
      'behind a queue that is shorter than what it would hold up',
      figures({ prefill: { ...idle, aheadS: 1.9 }, decode: { ...idle, running: 3 } }),
      'worth',
      '2000 of 4000 tokens uncached, there 3900 ms, here 2000 ms, holds up 3 answers for 2000 ms',
    ],
    [
      'not behind a longer one',
      figures({ prefill: { ...idle, aheadS: 2.1 }, decode: { ...idle, running: 3 } }),
      'busy',
      '2000 of 4000 tokens uncached, there 4100 ms, here 2000 ms, holds up 3 answers for 2000 ms',
    ],
    [
      'where it is computed just in time',
      figures({ tokens: 40_000, uncachedTokens: 30_000 }),
      'worth',
      '30000 of 40000 tokens uncached, there 30000 ms, here 30000 ms',
    ],
    [
      'not where the leg would be cut before it is computed',
      figures({ tokens: 40_000, uncachedTokens: 31_000 }),
      'busy',
      '31000 of 40000 tokens uncached, there 31000 ms, above 30000, here 31000 ms',
    ],
    [
      'not behind a queue that takes most of that time, however many answers wait',
      figures({ prefill: { ...idle, aheadS: 29 }, decode: { aheadS: 60, prefillTokensPerS: 1_000, running: 9 } }),
      'busy',
      '2000 of 4000 tokens uncached, there 31000 ms, above 30000, here 62000 ms, holds up 9 answers for 2000 ms',
    ],
  ])('%s', (_, given, reason, why) => {
    // Of one that is split, when its prompt is computed: what a deadline is held against.
    const told = /there (\d+) ms/.exec(why)?.[1];
    const thereS = reason === 'worth' ? Number(told) / 1_000 : undefined;
    expect(decideSplit(given, limits)).toEqual({ split: reason === 'worth', reason, why, thereS });
  });
});

const seconds = fc.double({ min: 0, max: 100, noNaN: true });
const rate = fc.double({ min: 1, max: 1e6, noNaN: true });
const anyFigures = fc
  .record({
    tokens: fc.integer({ min: 1, max: 1e6 }),
    cachedShare: fc.double({ min: 0, max: 1, noNaN: true }),
    decode: fc.record({ aheadS: seconds, prefillTokensPerS: rate, running: fc.integer({ min: 0, max: 100 }) }),
    prefill: fc.option(fc.record({ aheadS: seconds, prefillTokensPerS: rate }), { nil: undefined }),
  })
  .map(
    ({ cachedShare, ...rest }): SplitFigures => ({
      ...rest,
      uncachedTokens: Math.max(1, Math.round(rest.tokens * (1 - cachedShare))),
    }),
  );

it('more work ahead there never makes a split, more work here never takes one away', () => {
  fc.assert(
    fc.property(anyFigures, seconds, (given, more) => {
      const { split } = decideSplit(given, limits);
      const { prefill, decode } = given;
      const there = prefill && { ...prefill, aheadS: prefill.aheadS + more };
      if (!split) expect(decideSplit({ ...given, prefill: there }, limits).split).toBe(false);
      const here = { ...decode, aheadS: decode.aheadS + more, running: decode.running + 1 };
      if (split) expect(decideSplit({ ...given, decode: here }, limits).split).toBe(true);
    }),
  );
});

it('never for less than is asked for, never without a pod, and without patience never for a slower first token', () => {
  fc.assert(
    fc.property(anyFigures, (given) => {
      const { split, why } = decideSplit(given, { ...limits, patience: 0 });
      expect(why).toMatch(/^[\x20-\x7e]+$/);
      if (!split) return;
      expect(given.uncachedTokens).toBeGreaterThanOrEqual(512);
      const at = ({ aheadS, prefillTokensPerS }: { aheadS: number; prefillTokensPerS: number }): number =>
        aheadS + given.uncachedTokens / prefillTokensPerS;
      expect(at(given.prefill!)).toBeLessThanOrEqual(at(given.decode));
    }),
  );
});
