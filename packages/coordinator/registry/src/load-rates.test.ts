/** What a worker is thought to bring in from media that it has not measured. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { expectedLoads, usualLoads } from './load-rates.ts';

it('a worker that has measured nothing counts as the others, and where none has, as four times as fast as it computes', () => {
  const usual = usualLoads(4, [[0, 0, 0, 900], [0, 500, 0, 300], []]);
  expect(usual).toEqual([0, 500, 0, 600]);
  expect(expectedLoads([], usual, 100)).toEqual([0, 500, 400, 600]);
  expect(expectedLoads([0, 0, 7, 0], usual, 100)).toEqual([0, 500, 7, 600]);
});

it('one without a cache node brings in nothing but what it has measured', () => {
  expect(expectedLoads([], undefined, 100)).toEqual([]);
  expect(expectedLoads([0, 3], undefined, 100)).toEqual([0, 3]);
});

it('property: its own word is never changed, and no medium but the GPU is taken for one that cannot be brought from', () => {
  const rate = fc.oneof(fc.constant(0), fc.double({ min: 1e-3, max: 1e9, noNaN: true }));
  const rates = fc.array(rate, { minLength: 6, maxLength: 6 });
  fc.assert(
    fc.property(
      rates,
      fc.array(rates, { maxLength: 8 }),
      fc.double({ min: 1, max: 1e6, noNaN: true }),
      (own, all, perS) => {
        const expected = expectedLoads(own, usualLoads(6, all), perS);
        expect(expected).toHaveLength(6);
        expect(expected[0]).toBe(0);
        for (let medium = 1; medium < 6; medium++) {
          const known = all.map((one) => one[medium]!).filter((one) => one > 0);
          const least = known.length === 0 ? 4 * perS : Math.min(...known);
          const most = known.length === 0 ? 4 * perS : Math.max(...known);
          if (own[medium]! > 0) expect(expected[medium]).toBe(own[medium]);
          else {
            expect(expected[medium]).toBeGreaterThanOrEqual(least * (1 - 1e-9));
            expect(expected[medium]).toBeLessThanOrEqual(most * (1 + 1e-9));
          }
        }
      },
    ),
  );
});
