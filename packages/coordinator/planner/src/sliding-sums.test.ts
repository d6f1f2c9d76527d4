import fc from 'fast-check';
import { expect, it } from 'vitest';
import { SlidingSums } from './sliding-sums.ts';

it('is the sum of all events of the window, to a slice', () => {
  const events = fc.array(fc.tuple(fc.integer({ min: 0, max: 5_000 }), fc.integer({ min: 0, max: 100 })), {
    maxLength: 60,
  });
  fc.assert(
    fc.property(events, (steps) => {
      const [windowMs, sliceMs] = [3_000, 100];
      const sums = new SlidingSums(['x', 'y'], windowMs, 0);
      const seen: [atMs: number, amount: number][] = [];
      let nowMs = 0;
      for (const [afterMs, amount] of steps) {
        nowMs += afterMs;
        sums.add('x', amount, nowMs);
        seen.push([nowMs, amount]);
        const within = (ms: number): number =>
          seen.filter(([atMs]) => nowMs - atMs < ms).reduce((all, [, one]) => all + one, 0);
        const sum = sums.sum('x', nowMs);
        expect(sum).toBeGreaterThanOrEqual(within(windowMs - sliceMs));
        expect(sum).toBeLessThanOrEqual(within(windowMs));
        expect(sums.sum('y', nowMs)).toBe(0);
      }
    }),
  );
});

it('a rate is over the time there was, and ends with its window', () => {
  const sums = new SlidingSums(['x'], 30_000, 10_000);
  for (let ms = 10_000; ms < 20_000; ms += 100) sums.add('x', 10, ms);
  expect(sums.perS('x', 20_000)).toBeCloseTo(100, 5);
  expect(sums.perS('x', 30_000)).toBeCloseTo(50, 5);
  expect(sums.perS('x', 60_000)).toBe(0);
});
