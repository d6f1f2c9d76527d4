/** When a lookup of what only peers hold is worth its time. */
import { expect, it } from 'vitest';
import { Asking } from './asking.ts';

it('asks until it knows better, then where peers may be faster than computing', () => {
  const asking = new Asking();
  expect(asking.isWorth(30, 1, 0)).toBe(true); // nobody has said anything
  asking.told(600);
  expect(asking.isWorth(30, 9_000, 0)).toBe(true); // the first time
  expect(asking.isWorth(30, 9_000, 100)).toBe(false);
  expect(asking.isWorth(30, 13_000, 100)).toBe(false); // 18 ms, or 13.5 when it took three quarters
  expect(asking.isWorth(30, 14_000, 100)).toBe(true);
  expect(asking.isWorth(30, 4_000, 100, true)).toBe(false); // some of 18 ms could be computed meanwhile, but not much
  expect(asking.isWorth(30, 5_000, 100, true)).toBe(true);
  asking.paidNot();
  expect(asking.isWorth(30, 5_000, 100, true)).toBe(false);
  asking.paid();
  expect(asking.isWorth(30, 5_000, 100, true)).toBe(true);
  asking.told(100);
  expect(asking.isWorth(30, 9_000, 100)).toBe(true);
});

it('asks again now and then, ever less often, and as often as at first when it has paid', () => {
  const asking = new Asking();
  asking.told(600);
  const times = (fromS: number, toS: number): number[] =>
    Array.from({ length: toS - fromS }, (_, at) => fromS + at).filter((s) => asking.isWorth(30, 9_000, s * 1_000));
  expect(times(0, 300)).toEqual([0, 2, 6, 14, 30, 62, 122, 182, 242]);
  asking.paid();
  expect(times(304, 312)).toEqual([304, 306, 310]);
});

it('says what would be clearly slower without spending what is asked now and then', () => {
  const asking = new Asking();
  expect(asking.isClearlySlower(30, 1)).toBe(false); // nobody has said anything
  asking.told(600);
  const told = [13_000, 13_500, 13_501].map((computeUs) => asking.isClearlySlower(30, computeUs));
  expect(told).toEqual([true, true, false]);
  expect([4_500, 4_501].map((computeUs) => asking.isClearlySlower(30, computeUs, true))).toEqual([true, false]);
  expect(asking.isWorth(30, 9_000, 0)).toBe(true); // the first time still
});
