/** In the simulated cluster: media that nobody has brought anything in from yet. */
import { policies } from '@kvtier/routing';
import { expect, it } from 'vitest';
import { simulate } from './routing/cluster.ts';
import { hardware } from './routing/hardware.ts';
import type { Trace } from './traces.ts';

const blockTokens = 64;

/** One document, and a crowd that asks about it while only the worker that was asked first holds it. */
function crowd(tokens: number, requests: number, everyMs: number): Trace {
  const blocks = Int32Array.from({ length: tokens / blockTokens }, (_, i) => i);
  const all = Array.from({ length: requests + 1 }, (_, i) => i);
  return {
    ...{ name: 'crowd', blockTokens, uniqueBlocks: blocks.length },
    requests: all.map(() => blocks),
    arrivalsMs: Float64Array.from(all, (i) => (i === 0 ? 0 : 60_000 + i * everyMs)),
    inputTokens: Int32Array.from(all, () => tokens + 400),
    outputTokens: Int32Array.from(all, () => 50),
  };
}

it('a crowd is spread to workers that have never brought anything in, as soon as that is faster than to wait', () => {
  const { ttftS } = simulate(crowd(16_000, 100, 10), 'late', hardware, 1, 1);
  // To compute it takes 0.8 s, to bring it in 0.2 s.
  expect(Math.max(...ttftS.subarray(1))).toBeLessThan(0.6);
});

it('a crowd waits no longer, on average, than where each of it goes to the least loaded worker', () => {
  const mean = (policy: Parameters<typeof simulate>[1], everyMs: number): number => {
    const { ttftS } = simulate(crowd(16_000, 100, everyMs), policy, hardware, 1, 1);
    return ttftS.subarray(1).reduce((sum, s) => sum + s, 0) / 100;
  };
  for (const everyMs of [0, 10, 30])
    expect(mean('late', everyMs)).toBeLessThanOrEqual(mean(policies['least-loaded'](), everyMs));
  // Here it pays for waiting first, and buys as often as the other.
  expect(mean('late', 3)).toBeLessThan(1.05 * mean(policies['least-loaded'](), 3));
});

it('where bringing in is slower than computing, the first one that weighs it tells: requests stay where the document is', () => {
  const slow = { ...hardware, peerTokensPerS: 10_000 };
  const { peerTokens, ttftS } = simulate(crowd(16_000, 100, 20), policies.predicted(), slow, 1, 1);
  expect(peerTokens).toBe(0);
  expect(Math.max(...ttftS.subarray(1))).toBeLessThan(1.7);
});
