/** In the simulated cluster: kinds of load on which our own policy was once behind another one. */
import { policies } from '@kvtier/routing';
import { expect, it } from 'vitest';
import { simulate } from './routing/cluster.ts';
import { generated } from './routing/generated.ts';
import { hardware } from './routing/hardware.ts';
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
