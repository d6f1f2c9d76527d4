import fc from 'fast-check';
import { expect, it } from 'vitest';
import type { WorkerState } from './policy.ts';
import { ResponseOrder } from './response-order.ts';
import { stateOf } from './testing/late-rig.ts';

const orderOf = (shares: readonly number[]): ResponseOrder => {
  const order = new ResponseOrder();
  for (const share of shares) order.given(share);
  return order;
};
const times = (count: number, share: number): number[] => Array.from({ length: count }, () => share);

it.each([
  ['nothing is known', times(15, 0), 1],
  ['nothing is held', times(16, 0), 0.4],
  ['next to nothing is held', times(300, 0.05), 0.4],
  ['some is held', times(20, 0.161), 0.8],
  ['much is held', times(16, 0.3), 1.3],
  ['all is held', times(300, 1), 1.3],
  ['much was held of those before the last 256', [...times(300, 1), ...times(256, 0)], 0.4],
])('prefers short ones by how much is held of prompts: %s', (_what, shares, power) => {
  expect(orderOf(shares).power).toBeCloseTo(power, 9);
});

it('who came first is preferred more while half of the workers have no place', () => {
  const full: WorkerState = { ...stateOf(0, 0, 1), running: 3, maxRunning: 4 };
  const free: WorkerState = { ...full, waiting: 0 };
  const powerBeside = (...workers: (WorkerState | undefined)[]): number => {
    const order = orderOf(times(16, 1));
    order.sees(workers);
    return order.power;
  };
  expect(powerBeside(full, free, undefined)).toBeCloseTo(0.4, 9);
  expect(powerBeside(full, free, free)).toBeCloseTo(1.3, 9);
  expect(powerBeside(stateOf(0, 0, 100))).toBeCloseTo(1.3, 9); // it does not say how many may run
  expect(powerBeside(undefined)).toBeCloseTo(1.3, 9);
});

it('the ratio is that of the power that is asked for, whatever was asked for before', () => {
  const share = fc.double({ min: 0, max: 1, noNaN: true });
  const one = fc.record({ sinceMs: fc.nat(1_000), needsMs: fc.integer({ min: 1, max: 1e6 }) });
  fc.assert(
    fc.property(fc.array(share, { maxLength: 600 }), fc.array(one), fc.array(fc.nat(12)), (shares, all, tenths) => {
      const order = orderOf(shares);
      const last = shares.slice(-256);
      const mean = last.reduce((sum, one) => sum + one, 0) / last.length;
      const exact = last.length < 16 ? 1 : 0.4 + (0.9 * (Math.min(Math.max(mean, 0.05), 0.3) - 0.05)) / 0.25;
      expect(Math.abs(order.power - exact)).toBeLessThanOrEqual(0.05 + 1e-9);
      for (const power of [...tenths.map((tenth) => tenth / 10), order.power])
        for (const each of all)
          expect(order.ratio(each, 2_000, power)).toBe((2_000 - each.sinceMs) / each.needsMs ** power);
    }),
  );
});
