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

it('tells that it is over once none came for twice as long as between the last crowds', () => {
  const arrivals = new Arrivals();
  for (let crowd = 0; crowd < 20; crowd++) for (let i = 0; i < 16; i++) arrivals.came(crowd * 1_000 + i, 5);
  // The last one came at 19,015, and 985 ms after the crowd before.
  expect([20_000, 20_985].map((ms) => arrivals.haveEnded(ms))).toEqual([true, true]);
  expect([20_000, 20_985, 20_986].map((ms) => arrivals.areOver(ms))).toEqual([false, false, true]);
  // One pause is behind the last 256.
  for (let i = 0; i < 256; i++) arrivals.came(22_000 + i, 5);
  expect([22_265, 22_266].map((ms) => arrivals.areOver(ms))).toEqual([false, true]);
  expect(new Arrivals().areOver(1e9)).toBe(false);
});
