/** In the simulated cluster: kinds of load on which our own policy was once behind another one. */
import { policies } from '@kvtier/routing';
import { expect, it } from 'vitest';
import { simulate } from './routing/cluster.ts';
import { generated } from './routing/generated.ts';
import { hardware } from './routing/hardware.ts';
import { seeded } from './routing/seeded.ts';
import type { Trace } from './traces.ts';

const p90 = (trace: Trace, policy: Parameters<typeof simulate>[1], speed: number): number => {
  const sorted = simulate(trace, policy, hardware, speed, 1).ttftS.sort();
  return sorted[Math.floor(sorted.length * 0.9)]!;
};

const first = (trace: Trace, count: number): Trace => ({
  ...trace,
  requests: trace.requests.slice(0, count),
  arrivalsMs: trace.arrivalsMs.slice(0, count),
});

it('among very long prompts short ones wait no longer than where prefix and queue are weighed', () => {
  const long = first(generated('long'), 1_000);
  // About its saturation.
  const speed = 7;
  const others = [policies.scored(), policies.sticky()].map((policy) => p90(long, policy, speed));
  expect(p90(long, 'late', speed)).toBeLessThan(Math.min(...others));
});

it('prompts that share nothing are done as soon as where each is served in its turn, whoever has the longest answer', () => {
  const count = 400;
  const all = Array.from({ length: count }, (_, i) => i);
  const batch: Trace = {
    ...{ name: 'batch', blockTokens: 64, uniqueBlocks: 0 },
    requests: all.map(() => new Int32Array(0)),
    arrivalsMs: Float64Array.from(all, (i) => 5 * i),
    // The longest answer comes with the longest prompt.
    inputTokens: Int32Array.from(all, (i) => (i === 20 ? 16_000 : 2_000 + (i % 7) * 300)),
    outputTokens: Int32Array.from(all, (i) => (i === 20 ? 2_000 : 100)),
  };
  const inTurn = simulate(batch, policies['round-robin'](), hardware, 1, 1);
  expect(simulate(batch, 'late', hardware, 1, 1).makespanS).toBeLessThanOrEqual(inTurn.makespanS);
});

it('a batch is done sooner than where prompts go to the worker whose answer runs on anyway', () => {
  const count = 400;
  const all = Array.from({ length: count }, (_, i) => i);
  const batch: Trace = {
    ...{ name: 'batch', blockTokens: 64, uniqueBlocks: 0 },
    requests: all.map(() => new Int32Array(0)),
    arrivalsMs: Float64Array.from(all, (i) => 5 * i),
    inputTokens: Int32Array.from(all, (i) => (i === 20 ? 200 : 2_000 + (i % 7) * 300)),
    outputTokens: Int32Array.from(all, (i) => (i === 20 ? 1_000 : 100)),
  };
  const makespanS = (policy: Parameters<typeof simulate>[1]): number =>
    simulate(batch, policy, hardware, 1, 1).makespanS;
  const others = [policies['round-robin'](), policies.sticky(), policies.predicted()].map(makespanS);
  expect(makespanS('late')).toBeLessThan(0.9 * Math.min(...others));
});

it.each([
  [24, 0.99],
  [21, 0.97],
])(
  'prompts that share nothing go to a worker when it is about to be done, and not before: every %i ms',
  (everyMs, share) => {
    const random = seeded(2);
    const exponential = (mean: number): number => -mean * Math.log(1 - random());
    const all = Array.from({ length: 600 }, (_, i) => i);
    let atMs = 0;
    const apart: Trace = {
      ...{ name: 'apart', blockTokens: 64, uniqueBlocks: 0 },
      requests: all.map(() => new Int32Array(0)),
      arrivalsMs: Float64Array.from(all, () => (atMs += exponential(everyMs))),
      inputTokens: Int32Array.from(all, () => 500 + exponential(2_500)),
      outputTokens: Int32Array.from(all, () => 20),
    };
    const others = [policies.sticky(), policies['overlap-cost'](), policies.predicted()];
    expect(p90(apart, 'late', 1)).toBeLessThan(share * Math.min(...others.map((policy) => p90(apart, policy, 1))));
  },
);
