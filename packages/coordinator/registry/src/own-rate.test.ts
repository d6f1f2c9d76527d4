/** How fast a pod computes prompts, as its own requests show, and which of them say nothing. */
import fc from 'fast-check';
import { beforeEach, describe, expect, it } from 'vitest';
import { OwnRate } from './own-rate.ts';
import { PodLoad } from './pod-load.ts';
import { type Scrape, scrapeOf } from './scrape.ts';

const idle = await scrapeOf('p', 'sglang:num_queue_reqs 0\nsglang:num_running_reqs 0\n');
const scrape = (running = 0, more: Partial<Scrape> = {}): Scrape => ({ ...idle, running, ...more });

let nowMs: number;
let pod: PodLoad;
beforeEach(() => {
  nowMs = 1_000;
  pod = new PodLoad(() => nowMs);
  told();
});
const told = (running = 0, more: Partial<Scrape> = {}): void =>
  pod.scraped(scrape(running, more), nowMs, pod.open, nowMs);
const send = (tokensAhead = 1_000) => pod.send({ tokensAhead, blocks: 10, loadS: 0 }, nowMs, () => {});
/** So many prompts, one after another, each at this rate. */
function compute(
  times: number,
  tokensPerS: number,
  { isTimed = true, tokens = 1_000, meanwhile = () => {} } = {},
): void {
  for (let i = 0; i < times; i++) {
    told();
    const sent = send(tokens);
    meanwhile();
    nowMs += (tokens / tokensPerS) * 1_000;
    sent.firstToken(isTimed);
    nowMs += 50;
    sent.ended();
  }
}
const rate = (): number => pod.load(0, () => 2_000).prefillTokensPerS;

describe('the rate of a pod that does not measure it', () => {
  it('is what is usual, until its own requests have shown it; then it follows them', () => {
    compute(2, 8_000);
    expect([rate(), pod.prefillTokensPerS]).toEqual([2_000, 0]);
    compute(1, 8_000);
    expect(rate()).toBeCloseTo(8_000);
    expect(pod.prefillTokensPerS).toBeCloseTo(8_000);
    compute(15, 500);
    expect(rate()).toBeCloseTo(500);
  });

  it.each<[string, Parameters<typeof compute>[2]]>([
    ['whose answer came as a whole, or that another pod computed', { isTimed: false }],
    ['of a few tokens', { tokens: 255 }],
    ['beside which another was sent', { meanwhile: () => send().ended() }],
    ['beside which others were seen', { meanwhile: () => told(3) }],
  ])('is not learned from a request %s', (_, how) => {
    compute(20, 8e6, how);
    expect(rate()).toBe(2_000);
  });

  it('is not learned from a pod that had something to do, or of which nothing was heard lately', () => {
    for (let i = 0; i < 20; i++) {
      told(1);
      const sent = send();
      nowMs += 100;
      sent.firstToken(true);
      sent.ended();
      told();
      nowMs += 1_000;
      const late = send();
      nowMs += 100;
      late.firstToken(true);
      late.ended();
    }
    expect(rate()).toBe(2_000);
  });

  it('is not what the pod measures itself', () => {
    compute(5, 8_000);
    for (let i = 0; i < 4; i++) told(0, { prefillTokens: 5_000 * i, prefillS: i });
    expect(rate()).toBe(5_000);
  });

  it('stays among what honest requests show while fewer than half of the last say anything else', () => {
    const honest = fc.double({ min: 900, max: 1_100, noNaN: true });
    const wild = fc.oneof(
      fc.double({ min: 1e-300, max: 1e300, noNaN: true }),
      fc.constantFrom(0, Number.NaN, -1, 1e12),
    );
    fc.assert(
      fc.property(fc.array(honest, { minLength: 15, maxLength: 15 }), fc.array(wild, { maxLength: 7 }), (good, bad) => {
        const own = new OwnRate();
        const all = [...good.slice(0, 15 - bad.length), ...bad];
        for (const tokensPerS of all) own.took(1_000, 1_000 / tokensPerS);
        expect(own.tokensPerS).toBeGreaterThanOrEqual(Math.min(...good) - 1e-6);
        expect(own.tokensPerS).toBeLessThanOrEqual(Math.max(...good) + 1e-6);
      }),
    );
  });
});
