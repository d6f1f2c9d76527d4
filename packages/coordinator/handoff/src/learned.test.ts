/** What is learned from how hand-offs went. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { Late } from './late.ts';
import { LinkRate } from './link-rate.ts';

it('a link that is waited for is measured; one that is not is as fast as what came over it, at least', () => {
  const link = new LinkRate();
  expect(link.perS).toBe(0);
  link.came({ blocks: 100, tookS: 1, afterS: 0.01 }); // as it was computed
  link.came({ blocks: 2, tookS: 0.04, afterS: 0.03 }); // as long as the way is
  expect(link.perS).toBe(0);
  link.came({ blocks: 100, tookS: 1, afterS: 0.5 });
  expect(link.perS).toBe(100);
  link.came({ blocks: 50, tookS: 1, afterS: 0.1 });
  expect(link.perS).toBe(100);
  link.came({ blocks: 200, tookS: 1, afterS: 0 });
  expect(link.perS).toBe(200);
  for (let i = 0; i < 30; i++) link.came({ blocks: 50, tookS: 1, afterS: 0.6 });
  expect(link.perS).toBeCloseTo(50, 0);
  link.came({ blocks: 0, tookS: 1, afterS: 0.6 });
  expect(link.perS).toBeCloseTo(50, 0);
});

it('whatever comes, a rate is finite, and stays one once it is one', () => {
  const seconds = fc.double({ min: 0, max: 1_000, noNaN: true });
  const transfers = fc.array(
    fc.record({ blocks: fc.integer({ min: 1, max: 10_000 }), tookS: seconds, afterS: seconds }),
    {
      minLength: 1,
    },
  );
  fc.assert(
    fc.property(transfers, (all) => {
      const link = new LinkRate();
      for (const one of all) {
        const before = link.perS;
        link.came(one);
        expect(Number.isFinite(link.perS) && (before > 0 ? link.perS > 0 : link.perS >= 0)).toBe(true);
      }
    }),
  );
});

it('lateness goes to the middle of what is seen, within its bounds, and one that is very late counts no more', () => {
  const late = new Late(0, 0.5);
  for (let i = 0; i < 400; i++) late.came(1 + late.s, i % 10 === 0 ? 100 : 1.05);
  expect(late.s).toBeGreaterThan(0.03);
  expect(late.s).toBeLessThan(0.08);
  for (let i = 0; i < 400; i++) late.came(1 + late.s, 0);
  expect(late.s).toBe(0);
  for (let i = 0; i < 1_000; i++) late.came(0, 1);
  expect(late.s).toBe(0.5);
  for (let i = 0; i < 1_000; i++) late.forget(0.01);
  expect(late.s).toBeLessThan(0.001);
});

it('lateness of nine in ten is what nine in ten do not pass', () => {
  const late = new Late(0, 0.5, 0.9);
  let beyond = 0;
  for (let i = 0; i < 4_000; i++) {
    const seenS = ((i * 7) % 100) / 1_000; // even, from 0 to 99 ms
    if (i >= 2_000 && seenS > late.s) beyond++;
    late.came(late.s, seenS);
  }
  expect(late.s).toBeGreaterThan(0.08);
  expect(late.s).toBeLessThan(0.1);
  expect(beyond / 2_000).toBeCloseTo(0.1, 1);
});
