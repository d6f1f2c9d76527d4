import * as fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { RentOrBuy } from './rent-or-buy.ts';

/** A prompt whose block `i` has the hash (first + i, 1). */
const prompt = (first: number, blocks: number): Int32Array =>
  Int32Array.from({ length: 2 * blocks }, (_, i) => (i % 2 === 0 ? first + i / 2 : 1));

describe('rent or buy', () => {
  it('buys when the rents that were paid reach the price, and goes on with what was too much', () => {
    const rents = new RentOrBuy();
    const pays = (rentS: number): boolean => rents.pays(prompt(1, 4), 3, rentS, 1, 0);
    expect([0.5, 0.25, 0.25, 0.75, 0.5, 0.5, 0.25].map(pays)).toEqual([false, false, true, false, true, false, true]);
  });

  it('counts each prefix by itself, whatever follows it in the prompt', () => {
    const rents = new RentOrBuy();
    expect(rents.pays(prompt(1, 8), 4, 0.5, 1, 0)).toBe(false);
    expect(rents.pays(prompt(1, 8), 5, 0.5, 1, 0)).toBe(false);
    expect(rents.pays(prompt(100, 8), 4, 0.5, 1, 0)).toBe(false);
    expect(rents.pays(prompt(1, 4), 4, 0.5, 1, 0)).toBe(true);
  });

  it('half of what was paid is forgotten after a hundred times the price, whatever the price is', () => {
    for (const priceS of [0.25, 8]) {
      const rents = new RentOrBuy();
      const pays = (share: number, atS: number): boolean =>
        rents.pays(prompt(1, 4), 4, share * priceS, priceS, atS * 1000);
      expect(pays(0.5, 0)).toBe(false);
      // A quarter is left, and an eighth.
      expect(pays(0.5, 100 * priceS)).toBe(false);
      expect(pays(0.6, 200 * priceS)).toBe(false);
      expect(pays(0.5, 300 * priceS)).toBe(false);
      expect(pays(0.6, 300 * priceS)).toBe(true);
    }
  });

  it('never buys for a prompt that has no such block', () => {
    const rents = new RentOrBuy();
    expect(rents.pays(new Int32Array(0), 4, 10, 1, 0)).toBe(false);
    expect(rents.prefixes).toBe(0);
  });

  it('is bounded: who has not paid for the longest time is forgotten', () => {
    const rents = new RentOrBuy();
    for (let i = 0; i <= 4_096; i++) {
      rents.pays(prompt(i, 1), 1, 0.5, 1, 0);
      rents.pays(prompt(0, 1), 1, 0, 1, 0);
    }
    expect(rents.prefixes).toBe(4_096);
    expect(rents.pays(prompt(1, 1), 1, 0.5, 1, 0)).toBe(false);
    expect(rents.pays(prompt(0, 1), 1, 0.5, 1, 0)).toBe(true);
  });

  const eighths = (most: number): fc.Arbitrary<number> => fc.integer({ min: 0, max: most }).map((n) => n / 8);
  it('what was bought was paid for, and what is paid for is bought', () => {
    const request = fc.tuple(
      fc.nat(3),
      eighths(8),
      fc.integer({ min: 1, max: 64 }).map((n) => n / 8),
    );
    fc.assert(
      fc.property(fc.array(request, { maxLength: 100 }), (requests) => {
        const rents = new RentOrBuy();
        const naive = new Map<number, { rentS: number; priceS: number }>();
        for (const [prefix, rentS, priceS] of requests) {
          const all = naive.get(prefix) ?? { rentS: 0, priceS: 0 };
          all.rentS += rentS;
          const buys = all.rentS - all.priceS >= priceS;
          if (buys) all.priceS += priceS;
          naive.set(prefix, all);
          expect(rents.pays(prompt(10 * prefix, 2), 2, rentS, priceS, 0)).toBe(buys);
          expect(all.priceS).toBeLessThanOrEqual(all.rentS);
        }
      }),
      { numRuns: Number(process.env.KVTIER_PROPERTY_RUNS ?? 200) },
    );
  });
});
