/** In the simulated cluster: traces with next to nothing in them. */
import { expect, it } from 'vitest';
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
