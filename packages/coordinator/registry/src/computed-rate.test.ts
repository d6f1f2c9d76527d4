/** What a pod has computed by the clock: never more than it can, and nearly that where it has always something to compute. */
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { ComputedRate } from './computed-rate.ts';
import { PodLoad } from './pod-load.ts';
import { scrapeOf } from './scrape.ts';

const idle = await scrapeOf('p', 'vllm:num_requests_waiting 0\nvllm:num_requests_running 0\n');

it.each([1, 4, 16])('prompts that are computed %i in one step are as fast as they are', (together) => {
  let nowMs = 1_000;
  const pod = new PodLoad(() => nowMs);
  const stepS = (together * 512) / 40_000;
  const steps = Math.ceil(0.25 / stepS);
  for (let i = 0; i < 40; i++) {
    const prompts = together * steps * i;
    // In a step each counts all of it as its own.
    const told = { prefills: prompts, prefillTokens: 512 * prompts, prefillS: stepS * prompts };
    pod.scraped({ ...idle, ...told, running: 1, computedTokens: 512 * prompts }, nowMs, 0, nowMs);
    nowMs += steps * stepS * 1_000;
  }
  expect(pod.prefillTokensPerS).toBeGreaterThanOrEqual(39_000);
  expect(pod.prefillTokensPerS).toBeLessThanOrEqual(41_000);
});

describe('the time in which it had something to do', () => {
  const perS = (times: readonly (readonly [tokens: number, seconds: number, isIdle?: boolean])[]): number => {
    const rate = new ComputedRate();
    for (const [tokens, seconds, isIdle = false] of times) rate.took(tokens, seconds, isIdle);
    return rate.tokensPerS;
  };
  const often = <T>(...times: readonly T[]): T[] => Array.from({ length: 16 }, () => times).flat();

  it('is that between two prompts, too, and none in which it had nothing', () => {
    expect(perS(often([0, 0.25], [0, 0.5], [1_500, 0.25]))).toBeCloseTo(1_500);
    expect(perS(often([0, 100, true], [1_500, 1]))).toBeCloseTo(1_500);
  });

  it('of few says nothing, nor does a counter that went back', () => {
    expect(perS(often([1_500, 1] as const).slice(1))).toBe(0);
    expect(perS(often([-5, 1] as const))).toBe(0);
  });

  it('says no more than a pod can, however long its prompts are', () => {
    const scrapeS = 0.25;
    const prompts = fc.array(fc.integer({ min: 1, max: 60_000 }), { minLength: 40, maxLength: 80 });
    fc.assert(
      fc.property(prompts, (all) => {
        const rate = new ComputedRate();
        // One after another, 10,000 a second.
        let doneS = 0;
        let scrapedS = 0;
        let tokens = 0;
        for (const prompt of all) {
          doneS += prompt / 10_000;
          while (scrapedS + scrapeS < doneS) {
            rate.took(tokens, scrapeS, false);
            scrapedS += scrapeS;
            tokens = 0;
          }
          tokens += prompt;
        }
        // Of 16 times, a scrape's each at least, the first may have had another one's prompt.
        expect(rate.tokensPerS).toBeLessThanOrEqual(10_000 * (1 + 1 / 16) + 1e-6);
      }),
    );
  });
});
