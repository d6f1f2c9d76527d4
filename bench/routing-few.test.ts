/** In the simulated cluster: traces with next to nothing in them. */
import { policies } from '@kvtier/routing';
import { expect, it } from 'vitest';
import { simulate } from './routing/cluster.ts';
import { compare } from './routing/compare.ts';
import { hardware } from './routing/hardware.ts';
import type { Trace } from './traces.ts';

const of = (requests: number, tokens: number): Trace => ({
  ...{ name: 'few', blockTokens: 1, uniqueBlocks: 0 },
  requests: Array.from({ length: requests }, () => new Int32Array(0)),
  arrivalsMs: Float64Array.from({ length: requests }, (_, i) => 100 * i),
  inputTokens: new Int32Array(requests).fill(tokens),
  outputTokens: new Int32Array(requests).fill(1),
});

it.each([
  ['a single request', of(1, 1_000)],
  ['prompts that have no whole block', of(5, 100)],
])('%s: a figure of every policy at every load', (_name, trace) => {
  const rows = compare(trace, hardware, () => {});
  for (const { ttftP90S, tokensPerS } of rows) {
    expect(ttftP90S).toBeGreaterThan(0);
    expect(tokensPerS).toBeGreaterThan(0);
  }
});

it('an index of what workers hold is kept for policies that ask one, and for no others: most of a run would be spent on it', () => {
  const trace: Trace = {
    ...of(3, 1_000),
    requests: Array.from({ length: 3 }, () => Int32Array.from({ length: 900 }, (_, i) => i)),
  };
  const bytes = (policy: Parameters<typeof simulate>[1]): number => simulate(trace, policy, hardware, 1, 1).indexBytes;
  expect([policies['least-loaded'](), policies['hash-trie'](), policies.scored()].map(bytes)).toEqual([0, 0, 0]);
  expect(Math.min(...['late' as const, policies.sticky(), policies['overlap-cost']()].map(bytes))).toBeGreaterThan(0);
});
