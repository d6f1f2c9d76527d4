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

/** Prompts that share nothing, one each 5 ms; one of them is longer than the others, or its answer is. */
function batchWith(longest: { readonly input: number; readonly output: number }): Trace {
  const all = Array.from({ length: 400 }, (_, i) => i);
  return {
    ...{ name: 'batch', blockTokens: 64, uniqueBlocks: 0 },
    requests: all.map(() => new Int32Array(0)),
    arrivalsMs: Float64Array.from(all, (i) => 5 * i),
    inputTokens: Int32Array.from(all, (i) => (i === 20 ? longest.input : 2_000 + (i % 7) * 300)),
    outputTokens: Int32Array.from(all, (i) => (i === 20 ? longest.output : 100)),
  };
}
const makespanS = (trace: Trace, policy: Parameters<typeof simulate>[1]): number =>
  simulate(trace, policy, hardware, 1, 1).makespanS;

it.each([
  { input: 16_000, output: 2_000 },
  { input: 200, output: 1_000 },
])(
  'prompts that share nothing are done as soon as where each is served in its turn, whoever has the longest answer: %o',
  (longest) => {
    const batch = batchWith(longest);
    expect(makespanS(batch, 'late')).toBeLessThanOrEqual(makespanS(batch, policies['round-robin']()));
  },
);

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

/** Prompts that share nothing, by chance one each `everyMs`; `tokensOf` says how long one is, from a number of 0 to 1. */
function apartFrom(count: number, everyMs: number, answerTokens: number, tokensOf: (part: number) => number): Trace {
  const random = seeded(3);
  const all = Array.from({ length: count }, (_, i) => i);
  let atMs = 0;
  return {
    ...{ name: 'apart', blockTokens: 64, uniqueBlocks: 0 },
    requests: all.map(() => new Int32Array(0)),
    arrivalsMs: Float64Array.from(all, () => (atMs -= everyMs * Math.log(1 - random()))),
    inputTokens: Int32Array.from(all, () => tokensOf(random())),
    outputTokens: Int32Array.from(all, () => answerTokens),
  };
}

it.each([
  [0.15, 5],
  [0.2, 4],
  [0.35, 2],
])(
  'where %d of all prompts are %i times as long, nine of ten are answered sooner than in any other order',
  (share, times) => {
    const two = apartFrom(1_000, 5, 20, (part) => (part < share ? 1_000 * times : 1_000));
    const others = [policies['overlap-cost'](), policies['balanced-tree'](), policies.scored()];
    expect(p90(two, 'late', 1)).toBeLessThan(Math.min(...others.map((policy) => p90(two, policy, 1))));
  },
);

it('where places are short, too, because answers take longer than prompts', () => {
  const chats = apartFrom(2_000, 2, 150, (part) => 100 - 300 * Math.log(1 - part));
  const others = [policies['overlap-cost'](), policies.sticky(), policies.scored()];
  expect(p90(chats, 'late', 1)).toBeLessThan(Math.min(...others.map((policy) => p90(chats, policy, 1))));
});
