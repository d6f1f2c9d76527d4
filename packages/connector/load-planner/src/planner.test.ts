/** The load planner: whole, part or none, and never a plan that its own numbers call slower than computing. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { LoadPlanner } from './planner.ts';

const planner = () => new LoadPlanner(16, 5_000);

it('loads everything until prefill has been measured', () => {
  expect(planner().plan({ spans: [{ tier: 'disk', count: 100 }], estimatedUs: 4_000_000 }, 0).blocks).toBe(100);
  expect(planner().plan({ spans: [], estimatedUs: 0 }, 0)).toEqual({ blocks: 0, loadUs: 0, computeUs: 0 });
});

it('loads what is near and computes what is far', () => {
  const p = planner();
  p.observePrefill(1_600, 100_000); // 1,000 µs per block
  p.observeCopy(10, 1_000); // 100 µs per block
  const near = { tier: 'arena', count: 10 };
  expect(p.plan({ spans: [near], estimatedUs: 0 }, 0)).toEqual({ blocks: 10, loadUs: 1_000, computeUs: 0 });
  // 40 blocks at 2,000 µs each from disk: slower than computing
  expect(p.plan({ spans: [near, { tier: 'disk', count: 40 }], estimatedUs: 80_000 }, 0)).toEqual({
    blocks: 10,
    loadUs: 1_000,
    computeUs: 40_000,
  });
  // at 500 µs each it pays
  expect(p.plan({ spans: [near, { tier: 'disk', count: 40 }], estimatedUs: 20_000 }, 0).blocks).toBe(50);
  // a slow span in the middle is crossed when what lies behind it pays for it
  const crossed = [
    { tier: 'disk', count: 1 },
    { tier: 'arena', count: 50 },
  ];
  expect(p.plan({ spans: crossed, estimatedUs: 3_000 }, 0).blocks).toBe(51);
});

it('a part that cannot arrive before the deadline is not asked for', () => {
  const p = new LoadPlanner(16, 10);
  expect(p.plan({ spans: [{ tier: 'disk', count: 100 }], estimatedUs: 100_000 }, 0).blocks).toBe(10);
});

it('estimates that turned out false are corrected, and tried again later', () => {
  const p = planner();
  p.observePrefill(16, 1_000);
  const hit = { spans: [{ tier: 'disk', count: 10 }], estimatedUs: 1_000 };
  expect(p.plan(hit, 0).blocks).toBe(10);
  for (let i = 0; i < 6; i++) p.observeLoad(1_000 * p.correction(0), 20_000, 0);
  expect(p.correction(0)).toBeGreaterThan(15);
  expect(p.plan(hit, 0).blocks).toBe(0);
  expect(p.plan(hit, 60_000).blocks).toBe(10);
});

it('the deadline follows the time to compute, within bounds', () => {
  const p = planner();
  expect(p.deadlineMs(10)).toBe(5_000);
  expect(p.lookupDeadlineMs(10)).toBe(500);
  p.observePrefill(16, 10_000); // 10 ms per block
  expect(p.deadlineMs(1)).toBe(250);
  expect(p.deadlineMs(100)).toBe(1_000);
  expect(p.deadlineMs(100_000)).toBe(5_000);
  expect([1, 100, 100_000].map((blocks) => p.lookupDeadlineMs(blocks))).toEqual([100, 200, 500]);
});

it('property: no plan is slower than computing, by the planner’s own numbers', () => {
  const us = fc.double({ min: 0, max: 1e7, noNaN: true });
  const span = fc.record({ tier: fc.constantFrom('arena', 'disk', 'redis'), count: fc.integer({ min: 1, max: 500 }) });
  fc.assert(
    fc.property(
      fc.array(fc.tuple(fc.constantFrom('prefill', 'copy', 'trip', 'load'), fc.integer({ min: 1, max: 4_000 }), us)),
      fc.array(span, { maxLength: 6 }),
      us,
      (observations, spans, estimatedUs) => {
        const p = planner();
        for (const [kind, count, elapsedUs] of observations) {
          if (kind === 'prefill') p.observePrefill(count, elapsedUs);
          else if (kind === 'copy') p.observeCopy(count, elapsedUs);
          else if (kind === 'trip') p.observeRoundTrip(elapsedUs);
          else p.observeLoad(count, elapsedUs, 0);
        }
        const held = spans.reduce((sum, { count }) => sum + count, 0);
        const plan = p.plan({ spans, estimatedUs }, 0);
        const computeAll = p.computeUs(held);
        expect(plan.blocks).toBeLessThanOrEqual(held);
        expect(plan.loadUs).toBeLessThanOrEqual(5_000_000 * (1 + 1e-12));
        if (computeAll !== undefined) {
          expect(plan.loadUs + plan.computeUs).toBeLessThanOrEqual(computeAll);
          // and no end of a span would have been better
          let blocks = 0;
          for (const { count } of spans) {
            blocks += count;
            const copy = p.plan({ spans: [{ tier: 'arena', count: blocks }], estimatedUs: 0 }, 0);
            expect(copy.loadUs + copy.computeUs).toBeLessThanOrEqual(p.computeUs(blocks)!);
          }
        }
      },
    ),
    { numRuns: 2_000, examples: [[[['trip', 1, 5_000_001]], [{ tier: 'arena', count: 1 }], 0]] },
  );
});
