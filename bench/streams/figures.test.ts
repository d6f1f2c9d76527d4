/** What is told of streams when the proxy, or the coordinator, happens to be faster than the engines themselves. */
import { expect, it } from 'vitest';
import { timeFigures } from './figures.ts';

const of = (first: number, gaps: number) => {
  const all = (p99: number) => ({ count: 1, p50: p99 / 2, p90: p99, p99, p999: p99 });
  return { first: all(first), gaps: all(gaps) };
};

it('percentiles stand beside percentiles, and what is added beside what may be', () => {
  const figures = timeFigures({ straight: of(10, 200), proxied: of(15, 204), through: of(14, 202) });
  expect(figures.map(({ name, value, limit, ratio }) => [name, value, limit, ratio])).toEqual([
    ['first_token_p99', 14, 10, 10 / 14],
    ['first_token_than_proxy', 14, 15, 15 / 14],
    ['added_first_token_p99', 4, 2, 0.5],
    ['between_tokens_p99', 202, 200, 200 / 202],
    ['between_tokens_than_proxy', 202, 204, 204 / 202],
    ['added_between_tokens_p99', 2, 1, 0.5],
  ]);
});

it('no limit is below 0 where a bare proxy beats the engines asked straight, and nothing added is told as the least that is counted', () => {
  const figures = timeFigures({ straight: of(10, 200), proxied: of(9.95, 199.85), through: of(10, 199) });
  for (const { limit, ratio } of figures) expect(Math.min(limit, ratio)).toBeGreaterThan(0);
  const added = figures.filter(({ name }) => name.startsWith('added'));
  expect(added.map(({ value, ratio }) => [value, ratio])).toEqual([
    [0.01, 200],
    [0.01, 100],
  ]);
});
