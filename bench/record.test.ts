/** The page of figures is what the history says. */
import { readFileSync } from 'node:fs';
import { expect, it } from 'vitest';
import { page, type Run, readHistory } from './record.ts';

const run = (at: string, machine: string, suite: string, value: number): Run => ({
  ...{ at, commit: 'abc1234', machine, suite },
  figures: [{ name: 'rate', value, unit: 'GB/s', limit: 2, limitName: 'memcpy', ratio: value / 2 }],
});

it('shows the latest run of each suite on each machine', () => {
  const rows = page([
    run('2026-01-01', 'a', 'arena', 1),
    run('2026-01-02', 'b', 'arena', 3),
    run('2026-01-03', 'a', 'arena', 2),
  ])
    .split('\n')
    .filter((line) => /^## |^\| arena/.test(line));
  expect(rows).toEqual([
    '## a',
    '| arena | rate | 2.00 | 2.00 | GB/s | 1.000 | memcpy | 2026-01-03, abc1234 |',
    '## b',
    '| arena | rate | 3.00 | 2.00 | GB/s | 1.500 | memcpy | 2026-01-02, abc1234 |',
  ]);
});

it('bench/results/README.md is written from history.jsonl', () => {
  const written = readFileSync(new URL('./results/README.md', import.meta.url), 'utf8');
  expect(written, 'run a suite with --record, or write the page anew').toBe(page(readHistory()));
});
