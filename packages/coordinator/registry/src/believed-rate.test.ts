/** How far a measured prefill rate is believed: one bad sample, few tokens, another life of the process, nothing new for long. */
import { beforeEach, describe, expect, it } from 'vitest';
import { believedRate } from './believed-rate.ts';
import { PodLoad } from './pod-load.ts';
import { type Scrape, scrapeOf } from './scrape.ts';

const idle = await scrapeOf('p', 'vllm:num_requests_waiting 0\nvllm:num_requests_running 0\n');
const usual = (): number => 2_000;

/** A pod with its counters. */
class Counted {
  readonly load: PodLoad;
  readonly #now: () => number;
  #scrape: Scrape = { ...idle, startedAt: '1' };

  constructor(now: () => number) {
    this.#now = now;
    this.load = new PodLoad(now);
    this.#tell();
  }

  /** Between two scrapes. */
  computed(tokens: number, seconds: number, prompts = 1): void {
    const { prefills, prefillTokens, prefillS } = this.#scrape;
    const sums = { prefillTokens: prefillTokens + tokens, prefillS: prefillS + seconds };
    this.#scrape = { ...this.#scrape, ...sums, prefills: prefills + prompts };
    this.#tell();
  }

  restarted(startedAt: string): void {
    this.#scrape = { ...idle, startedAt };
    this.#tell();
  }

  perS(): number {
    return this.load.load(0, usual).prefillTokensPerS;
  }

  #tell(): void {
    this.load.scraped(this.#scrape, this.#now(), 0, this.#now());
  }
}

let nowMs: number;
let pod: Counted;
beforeEach(() => {
  nowMs = 1_000;
  pod = new Counted(() => nowMs);
});
const good = (times: number): void => {
  for (let i = 0; i < times; i++) pod.computed(4_000, 0.2);
};

describe('what a pod measures of its prompts', () => {
  it('is hardly changed by one that waited for something else, be it the first', () => {
    pod.computed(500, 40);
    expect(pod.perS()).toBe(2_000);
    good(2);
    expect(pod.perS()).toBeCloseTo(20_000);
    pod.computed(500, 40);
    expect(pod.perS()).toBeGreaterThan(10_000);
    good(15);
    pod.computed(500, 40);
    expect(pod.perS()).toBeCloseTo(20_000);
  });

  it('is not learned from the rest of prompts that it held', () => {
    for (let i = 0; i < 20; i++) pod.computed(12, 0.02);
    for (let i = 0; i < 20; i++) pod.computed(50 * 12, 50 * 0.02, 50);
    expect(pod.load.prefillTokensPerS).toBe(0);
  });

  it('is forgotten with the life of its process', () => {
    for (let i = 0; i < 5; i++) pod.computed(500, 40);
    expect(pod.perS()).toBeCloseTo(12.5);
    pod.restarted('2');
    expect([pod.load.prefillTokensPerS, pod.perS()]).toEqual([0, 2_000]);
    good(3);
    expect(pod.perS()).toBeCloseTo(20_000);
  });
});

it('a rate stays for a while without anything new, then drifts up to the usual one; never down', () => {
  const after = (measured: number, oldMs: number): number => believedRate(measured, usual, oldMs);
  expect([after(0, 0), after(20, 5_000), after(50_000, 1e9)]).toEqual([2_000, 20, 50_000]);
  expect(after(20, 15_000)).toBeCloseTo(200);
  expect(after(20, 25_000)).toBeCloseTo(632.5, 1);
  expect(after(20, 300_000)).toBeCloseTo(2_000);
});

it('of two pods that are as fast, one that was slow for a while gets requests again, and as many as the other', () => {
  const [a, b] = [pod, new Counted(() => nowMs)];
  const pods = [a, b];
  for (let i = 0; i < 10; i++) a.computed(4_000, 0.2);
  for (let i = 0; i < 10; i++) b.computed(4_000, 60); // 67 a second
  const mean = (): number => (a.load.prefillTokensPerS + b.load.prefillTokensPerS) / 2;
  /** When what each was given is done. */
  const doneMs = [nowMs, nowMs];
  const given = (seconds: number): number[] => {
    const counts = [0, 0];
    // 4,000 tokens each 150 ms: more than one of them computes.
    for (const endMs = nowMs + seconds * 1_000; nowMs < endMs; nowMs += 150) {
      const expectedMs = pods.map(({ load }, at) => {
        const ahead = (Math.max(doneMs[at]! - nowMs, 0) / 1_000) * 20_000;
        return (ahead + 4_000) / load.load(0, mean).prefillTokensPerS;
      });
      const at = expectedMs[0]! <= expectedMs[1]! ? 0 : 1;
      counts[at]!++;
      doneMs[at] = Math.max(doneMs[at]!, nowMs) + 200;
      pods[at]!.computed(4_000, 0.2);
    }
    return counts;
  };
  expect(given(5)[1]).toBe(0);
  given(115);
  const [toA, toB] = given(60);
  expect(toB! / toA!).toBeCloseTo(1, 1);
});
