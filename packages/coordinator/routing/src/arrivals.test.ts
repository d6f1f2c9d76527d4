import { expect, it } from 'vitest';
import { Arrivals } from './arrivals.ts';

it('tells how many came a second that need less, of the last 256, and nothing from a few', () => {
  const arrivals = new Arrivals();
  for (let i = 0; i < 15; i++) arrivals.came(i * 10, 5);
  expect(arrivals.shorterPerS(10, 150, 0)).toBe(0);
  for (let i = 15; i < 100; i++) arrivals.came(i * 10, i % 2 === 0 ? 5 : 50);
  // 15, and every second one of those after them.
  expect(arrivals.shorterPerS(10, 1_000, 0)).toBe(57);
  expect(arrivals.shorterPerS(100, 1_000, 0)).toBe(100);
  // A second tells little of two.
  expect(arrivals.shorterPerS(100, 1_000, 2)).toBe(50);
  for (let i = 0; i < 256; i++) arrivals.came(2_000, 50);
  expect(arrivals.shorterPerS(10, 3_000, 0)).toBe(0);
});

it('tells that none comes any more after ten gaps', () => {
  const arrivals = new Arrivals();
  for (let i = 0; i < 300; i++) arrivals.came(i * 20, 5);
  expect([6_170, 6_190].map((ms) => arrivals.haveEnded(ms))).toEqual([false, true]);
});
