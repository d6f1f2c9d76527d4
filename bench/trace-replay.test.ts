import { expect, it } from 'vitest';
import { replayIds, timeRequests } from './trace-replay.ts';
import { bundledTraces, readTraces } from './traces.ts';

const traces = readTraces(bundledTraces);

it('reads the traces that come with the project', () => {
  expect(
    traces.map(({ name, blockTokens, requests, uniqueBlocks }) => [name, blockTokens, requests.length, uniqueBlocks]),
  ).toEqual([
    ['agentic', 64, 400, 73_966],
    ['conversation', 512, 2000, 38_788],
    ['synthetic', 512, 2000, 33_310],
  ]);
});

it('hits what a set of all prefixes has, without a limit; less with one, and never more than fits', () => {
  const { requests, uniqueBlocks } = traces.find(({ name }) => name === 'conversation')!;
  const seen = new Set<number>();
  let expected = 0;
  for (const ids of requests) {
    for (let i = 0; i < ids.length && seen.has(ids[i]!); i++) expected++;
    for (const id of ids) seen.add(id);
  }
  for (const kind of ['blocks', 'radix'] as const) {
    expect(replayIds(kind, requests, uniqueBlocks).hits).toBe(expected);
    const { hits, tooLarge } = replayIds(kind, requests, Math.ceil(uniqueBlocks / 10));
    expect(hits).toBeGreaterThan(expected / 4);
    expect(hits).toBeLessThan(expected);
    expect(tooLarge).toBe(0);
    expect(replayIds(kind, requests, 10).tooLarge).toBeGreaterThan(0);
  }
});

it('times both structures', () => {
  const { requests, blockTokens: idTokens } = traces[1]!;
  const shape = { blocks: 8000, blockTokens: 16, maxModelTokens: 100_000 };
  for (const us of Object.values(timeRequests(requests.slice(0, 5), idTokens, shape))) expect(us).toBeGreaterThan(0);
});
