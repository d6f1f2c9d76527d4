/** Blocks that came to a node, of all hand-offs. */
import { expect, it } from 'vitest';
import { CameBlocks } from './came-blocks.ts';

it('counts what came after one moment and until another, whoever told it and however late', () => {
  const come = new CameBlocks(60_000);
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

it('loses nothing of the time that it keeps, however many reports come; long ago is known more coarsely', () => {
  const come = new CameBlocks(60_000);
  for (let ms = 1; ms <= 100_000; ms++) come.came(1, ms);
  expect(come.size).toBeLessThanOrEqual(1_024);
  const since = (ms: number) => come.between(100_000 - ms, 100_000);
  expect(since(32)).toBe(32);
  for (const ms of [100, 1_000, 10_000, 59_000]) expect(Math.abs(since(ms) / ms - 1)).toBeLessThan(1 / 32);
  // A thousand times as many in one moment are one.
  for (let i = 0; i < 100_000; i++) come.came(1, 100_001);
  expect([come.size <= 1_024, come.between(100_000, 100_001)]).toEqual([true, 100_000]);
});

it('forgets what is older', () => {
  const come = new CameBlocks(1_000);
  for (const ms of [0, 500, 999, 1_000, 1_001]) come.came(1, ms);
  expect([come.size, come.between(-1, 1_001)]).toEqual([4, 4]);
  come.came(1, 5_000);
  expect([come.size, come.between(-1, 5_000)]).toEqual([1, 1]);
});
