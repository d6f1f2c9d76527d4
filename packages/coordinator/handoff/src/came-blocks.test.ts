/** Blocks that came to a node, of all hand-offs. */
import { expect, it } from 'vitest';
import { CameBlocks } from './came-blocks.ts';

it('counts what came after one moment and until another, whoever told it and however late', () => {
  const come = new CameBlocks();
  come.came(10, 100);
  come.came(20, 300);
  come.came(5, 200); // told late
  come.came(0, 250);
  const counted = [
    [0, 1_000],
    [100, 300],
    [100, 299],
    [200, 300],
    [300, 1_000],
  ] as const;
  expect(counted.map(([from, to]) => come.between(from, to))).toEqual([35, 25, 5, 20, 0]);
});

it('keeps the last thousand reports, whatever comes', () => {
  const come = new CameBlocks();
  for (let ms = 1; ms <= 100_000; ms++) come.came(1, ms);
  expect(come.between(0, 100_000)).toBeLessThanOrEqual(2_048);
  expect(come.between(99_000, 100_000)).toBe(1_000);
});
