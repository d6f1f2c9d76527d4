import { expect, it } from 'vitest';
import { median, medianWithin, ratio } from './measured.ts';

const upTo = (count: number): number[] => Array.from({ length: count }, (_, at) => at + 1);

it('a median lies, 19 times out of 20, between the values that the binomial distribution names', () => {
  // Of 10 values the second to the ninth: 1 - 2 * (1 + 10) / 1024 = 0.979; of 9 of them the second to the eighth: 0.961.
  expect(medianWithin(upTo(10))).toEqual([2, 9]);
  expect(medianWithin(upTo(9).toReversed())).toEqual([2, 8]);
  expect(medianWithin(upTo(6))).toEqual([1, 6]);
  expect(medianWithin(upTo(40))).toEqual([14, 27]);
  expect(medianWithin([3])).toEqual([3, 3]);
});

it('of medians drawn at random 95 % or more lie within', () => {
  let state = 7;
  const draw = (): number => {
    state = (state * 1_103_515_245 + 12_345) % 2 ** 31;
    return state / 2 ** 31;
  };
  let within = 0;
  for (let run = 0; run < 2_000; run++) {
    const [from, to] = medianWithin(Array.from({ length: 25 }, draw));
    if (from <= 0.5 && 0.5 <= to) within += 1;
  }
  expect(within).toBeGreaterThanOrEqual(1_880);
});

it('a ratio is the median of pairs, not of either side', () => {
  expect(median([5, 1, 3])).toBe(3);
  expect(ratio([2, 40, 6], [1, 10, 2])).toBe('3.0000 (2.0000 to 4.0000)');
});
