/** The load planner: whole, part or none, and never a plan that its own numbers call slower than computing. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { positionsOf } from './compute-model.ts';
import type { Plan } from './plan.ts';
import { LoadPlanner } from './planner.ts';

const planner = () => new LoadPlanner(16, 5_000);
/** A prompt of so many tokens in one step. */
const prefill = (p: LoadPlanner, tokens: number, us: number): void =>
  p.observePrefill(tokens, positionsOf(0, tokens), us);
const nothing = { tiers: '', blocks: 0, us: 0 };

it('loads everything until prefill has been measured', () => {
  expect(planner().plan({ spans: [{ tier: 'disk', count: 100 }], estimatedUs: 4_000_000 }, 0).blocks).toBe(100);
  expect(planner().plan({ spans: [], estimatedUs: 0 }, 0)).toEqual({
    head: 0,
    blocks: 0,
    loadUs: 0,
    computeUs: 0,
    away: nothing,
  });
});

it('loads what is near and computes what is far', () => {
  const p = planner();
  prefill(p, 1_600, 100_000); // 1,000 µs per block
  p.observeCopy(10, 1_000, 0); // 100 µs per block
  const near = { tier: 'arena', count: 10 };
  expect(p.plan({ spans: [near], estimatedUs: 0 }, 0)).toEqual({
    ...{ head: 0, blocks: 10, loadUs: 1_000, computeUs: 0 },
    away: nothing,
  });
  // 40 blocks at 2,000 µs each from disk: slower than computing
  expect(p.plan({ spans: [near, { tier: 'disk', count: 40 }], estimatedUs: 80_000 }, 0)).toEqual({
    ...{ head: 0, blocks: 10, loadUs: 1_000, computeUs: 40_000 },
    away: nothing,
    passed: { byTier: { disk: 40 }, us: 80_000 }, // copies run beside
  });
  // at 500 µs each it pays
  expect(p.plan({ spans: [near, { tier: 'disk', count: 40 }], estimatedUs: 20_000 }, 0, 20).blocks).toBe(50);
  // a slow span in the middle is crossed when what lies behind it pays for it
  const crossed = [
    { tier: 'disk', count: 1 },
    { tier: 'arena', count: 50 },
  ];
  expect(p.plan({ spans: crossed, estimatedUs: 3_000 }, 0, 20).blocks).toBe(51);
});

it('a process that stood still, or whose first copy was slow, loads all the same', () => {
  const hit = { spans: [{ tier: 'arena', count: 64 }], estimatedUs: 0 };
  const usual = (): LoadPlanner => {
    const p = planner();
    prefill(p, 4_096, 256 * 500); // 500 µs per block
    for (let i = 0; i < 20; i++) p.observeCopy(64, 64 * 100, 0);
    for (let i = 0; i < 20; i++) p.observeRoundTrip(300, 0);
    return p;
  };
  const stood = usual();
  stood.observeCopy(64, 2_000_000, 0);
  expect(stood.plan(hit, 0).blocks).toBe(64);
  stood.observeRoundTrip(450_000, 0);
  expect(stood.plan(hit, 0).blocks).toBe(64);
  // Twice is no accident: nothing is loaded, until it is not believed any more.
  stood.observeCopy(64, 2_000_000, 2_000);
  expect(stood.plan(hit, 2_000).blocks).toBe(0);
  expect(stood.plan(hit, 60_000).blocks).toBe(64);
  // And what comes then counts for more than all that was seen before.
  for (let i = 1; i <= 10; i++) stood.observeCopy(64, 64 * 100, 60_000 + i);
  expect(stood.plan(hit, 60_010).loadUs / (64 * 100)).toBeLessThan(1.5);
  const trips = usual();
  for (let i = 1; i <= 50; i++) trips.observeRoundTrip(450_000, i * 450);
  expect(trips.plan(hit, 22_500).blocks).toBe(0);
  expect(trips.plan(hit, 200_000).blocks).toBe(64);
  const cold = planner();
  prefill(cold, 4_096, 256 * 500);
  cold.observeCopy(8, 20_000, 0);
  expect(cold.plan(hit, 0).blocks).toBe(0);
  expect(cold.plan(hit, 30_000).blocks).toBe(64);
});

it('what takes long after a quiet while is laid to no tier', () => {
  const p = planner();
  prefill(p, 4_096, 256 * 1_600);
  for (let i = 0; i < 20; i++) p.observeCopy(100, 100 * 100, 0);
  const mixed = {
    spans: [
      { tier: 'arena', count: 400 },
      { tier: 'disk', count: 4 },
    ],
    estimatedUs: 800,
  };
  const plan = p.plan(mixed, 60_000);
  expect(plan.blocks).toBe(404);
  p.observeLoad(plan, 404, 400 * 100 + 4 * 200 + 4 * 100, 60_000);
  expect(p.plan({ spans: [{ tier: 'disk', count: 500 }], estimatedUs: 100_000 }, 61_000).blocks).toBe(500);
});

it.each<[string, readonly (readonly [blocks: number, us: number])[]]>([
  ['all at once', [[100, 1_000]]],
  [
    'in pieces',
    [
      [96, 950],
      [4, 2_500],
    ],
  ],
])('copies that are slower than computing indeed are tried ever more seldom: %s', (_, copies) => {
  const p = planner();
  prefill(p, 4_096, 256 * 500);
  let tried = 0;
  for (let nowMs = 0; nowMs < 3_600_000; nowMs += 10_000) {
    if (p.plan({ spans: [{ tier: 'arena', count: 100 }], estimatedUs: 0 }, nowMs).blocks === 0) continue;
    for (const [blocks, us] of copies) p.observeCopy(blocks, blocks * us, nowMs);
    tried++;
  }
  expect(tried).toBeLessThan(15);
});

it('a spell of slow copies is not believed for as long as what was known for hours', () => {
  const p = planner();
  prefill(p, 4_096, 256 * 250);
  const seen = (us: number, nowMs: number): void => p.observeCopy(64, 64 * us, nowMs);
  for (let s = 0; s < 3 * 3_600; s += 10) seen(100, s * 1_000);
  const endMs = 3 * 3_600_000;
  let us = 100;
  for (let i = 0; i < 10; i++) {
    us *= 1.3;
    seen(us, endMs + i * 500);
  }
  const hit = { spans: [{ tier: 'arena', count: 64 }], estimatedUs: 0 };
  expect(p.plan(hit, endMs + 5_000).blocks).toBe(0);
  expect(p.plan(hit, endMs + 65_000).blocks).toBe(64);
});

it('lookups that stood still together are one accident', () => {
  const p = planner();
  prefill(p, 4_096, 256 * 500);
  for (let i = 0; i < 20; i++) p.observeRoundTrip(300, i * 10);
  for (let i = 0; i < 8; i++) p.observeRoundTrip(450_000, 1_000 + i);
  expect(p.plan({ spans: [{ tier: 'arena', count: 64 }], estimatedUs: 0 }, 1_010).blocks).toBe(64);
});

it('blocks are copied while others come: the slower of the two decides, and the last ones are copied behind', () => {
  const p = planner();
  prefill(p, 1_600, 1_000_000);
  p.observeCopy(10, 1_000, 0); // 100 µs per block
  const loadUs = (estimatedUs: number) => p.plan({ spans: [{ tier: 'peer', count: 40 }], estimatedUs }, 0).loadUs;
  expect(loadUs(20_000)).toBe(20_000 + 4 * 100);
  expect(loadUs(2_000)).toBe(40 * 100 + 4 * 100);
  const both = [
    { tier: 'peer', count: 2 },
    { tier: 'arena', count: 10 },
    { tier: 'peer', count: 8 },
  ];
  expect(p.plan({ spans: both, estimatedUs: 5_000 }, 0)).toMatchObject({ blocks: 20, loadUs: 5_000 + 1_000 + 400 });
});

it('behind a hit that is loaded whole there is a step to take, and computing takes many', () => {
  const p = planner();
  for (let round = 0; round < 20; round++) {
    for (let from = 0; from < 4_096; from += 512)
      p.observePrefill(512, positionsOf(from, from + 512), 1_000 + 512 * 30);
    p.observePrefill(1, 4_096, 1_000 + 30);
  }
  const held = 4_096 / 16;
  const computeUs = 8 * 1_000 + 4_096 * 30;
  expect(p.computeUs(held)).toBeCloseTo(computeUs, 3);
  const plan = (estimatedUs: number) => p.plan({ spans: [{ tier: 'peer', count: held }], estimatedUs }, 0);
  expect(plan(computeUs - 1_100)).toMatchObject({ blocks: held, computeUs: expect.closeTo(1_000, 0) });
  expect(plan(computeUs - 900).blocks).toBe(0);
});

it('a part that cannot arrive before the deadline is not asked for', () => {
  const p = new LoadPlanner(16, 10);
  expect(p.plan({ spans: [{ tier: 'disk', count: 100 }], estimatedUs: 100_000 }, 0).blocks).toBe(10);
});

it('estimates that turned out false are corrected, and tried again later', () => {
  const p = planner();
  prefill(p, 160, 10_000);
  const hit = (estimatedUs: number, tier = 'disk') => ({ spans: [{ tier, count: 10 }], estimatedUs });
  const plan = p.plan(hit(1_000), 0);
  expect(plan).toMatchObject({ blocks: 10, loadUs: 1_000, away: { tiers: 'disk', blocks: 10, us: 1_000 } });
  p.observeLoad(plan, 10, 20_000, 0);
  expect(p.plan(hit(1_000), 0).blocks).toBe(0);
  expect(p.plan(hit(1_000, 'peer'), 0)).toMatchObject({ blocks: 10, loadUs: 1_000 }); // another tier's estimates may be true
  expect(p.plan(hit(1_000), 60_000).blocks).toBe(10);
});

it('what the node has learned itself is not corrected a second time', () => {
  const p = planner();
  prefill(p, 160, 30_000);
  const hit = (estimatedUs: number) => ({ spans: [{ tier: 'peer', count: 10 }], estimatedUs });
  p.observeLoad(p.plan(hit(1_000), 0), 10, 20_000, 0);
  expect(p.plan(hit(20_000), 0)).toMatchObject({ blocks: 10, loadUs: 20_000 });
  // a node that believes to be slow by mistake is corrected by half at most: it may know what waits before us
  expect(p.plan(hit(80_000), 0).blocks).toBe(0);
});

it('what lies far back in a prompt takes longer to compute, and is rather loaded', () => {
  const p = planner();
  for (let from = 0; from < 4_096; from += 512) {
    const positions = positionsOf(from, from + 512);
    p.observePrefill(512, positions, 512 * 100 + positions * 0.1);
  }
  expect(p.computeUs(32)).toBeCloseTo(512 * 100 + positionsOf(0, 512) * 0.1, 0);
  expect(p.computeUs(32, 224)).toBeCloseTo(512 * 100 + positionsOf(3_584, 4_096) * 0.1, 0);
  const hit = { spans: [{ tier: 'peer', count: 32 }], estimatedUs: 100_000 };
  expect(p.plan(hit, 0, 0).blocks).toBe(0);
  expect(p.plan(hit, 0, 224).blocks).toBe(32);
});

it('an engine that has only imported leaves an end to compute, and so learns that it is faster', () => {
  const p = planner();
  const hit = { spans: [{ tier: 'peer', count: 60 }], estimatedUs: 60_000 };
  expect(p.plan(hit, 0).blocks).toBe(60); // nothing at all is known: the first request after a start
  p.observePrefill(1, 961, 2_000);
  expect(p.computeUs(60)).toBe(60 * 16 * 2_000); // by what a step costs by itself
  expect(p.plan(hit, 100)).toMatchObject({ blocks: 54, away: { blocks: 54, us: 54_000 }, loadUs: 54_000 });
  expect(p.plan(hit, 200).blocks).toBe(60); // once is enough, for a while
  prefill(p, 96, 2_000 + 96 * 30);
  expect(p.plan(hit, 200).blocks).toBe(0);
});

it('what was learned of the ends of long prompts is not believed of short ones', () => {
  const p = planner();
  for (let i = 0; i < 20; i++) p.observePrefill(96, positionsOf(1_824, 1_920), 96 * 400);
  const hit = { spans: [{ tier: 'peer', count: 29 }], estimatedUs: 70_000 };
  expect(p.computeUs(29)).toBe(29 * 16 * 400);
  expect(p.plan(hit, 0).blocks).toBe(0); // it is computed, and tells
  prefill(p, 464, 464 * 100);
  expect(p.computeUs(29)).toBeLessThan(50_000);
  expect(p.plan(hit, 100).blocks).toBe(0);
});

it('where loading is clearly faster little of an end is looked at, and that seldom', () => {
  const p = planner();
  prefill(p, 3_000, 300_000);
  // Five times as fast as computing, for all that is known of much longer prompts.
  const hit = { spans: [{ tier: 'peer', count: 30 }], estimatedUs: 9_000 };
  const probe = p.plan(hit, 10_000);
  expect(probe.blocks).toBe(24);
  p.observePrefill(96, positionsOf(384, 480), 9_600);
  const later = Array.from({ length: 300 }, (_, second) => p.plan(hit, 11_000 + second * 1_000).blocks);
  // 7.8 ms each, of 9 ms a load: the first one of these had been on credit.
  expect(later.flatMap((blocks, at) => (blocks < 30 ? [at] : []))).toEqual([109, 165, 221, 277]);
  expect(new Set(later)).toEqual(new Set([30, 24]));
});

it('what was learned of computing is looked at again where it decides, as often as it costs little', () => {
  const times = (loadUs: number): number[] => {
    const p = planner();
    prefill(p, 960, 70_000);
    const hit = { spans: [{ tier: 'peer', count: 60 }], estimatedUs: loadUs };
    return Array.from({ length: 300 }, (_, second) => second).filter((at) => p.plan(hit, at * 1_000).blocks < 60);
  };
  expect(times(69_999)).toEqual(Array.from({ length: 299 }, (_, at) => at + 1));
  expect(times(60_000).slice(0, 4)).toEqual([10, 21, 32, 43]);
  expect(times(35_000)).toEqual([62, 125, 188, 251]);
  expect(times(6_000)).toEqual([]);
});

it('a load that falls behind computing is given up, and one that only begins slowly is not', () => {
  const p = planner();
  expect(p.isWorthWaiting(0, 100, 0, 1_000, 0)).toBe(true); // nothing to compare with
  expect(p.judgeAfterMs(100, 0)).toBeUndefined();
  prefill(p, 1_600, 100_000);
  expect(p.judgeAfterMs(100, 0)).toBe(5);
  expect(p.judgeAfterMs(10, 0)).toBe(3);
  expect(p.isWorthWaiting(0, 100, 0, 4.9, 0)).toBe(true);
  expect(p.isWorthWaiting(0, 100, 0, 5, 0)).toBe(true); // 100 more at 1.25 ms each, but nothing came yet
  expect(p.isWorthWaiting(0, 100, 0, 19, 0)).toBe(true); // 6 of them count as under way
  expect(p.isWorthWaiting(0, 100, 0, 20, 0)).toBe(false);
  expect(p.isWorthWaiting(9, 100, 0, 19, 0)).toBe(true); // 91 more at 1.25 ms each
  expect(p.isWorthWaiting(9, 100, 0, 20, 0)).toBe(false);
  expect(p.isWorthWaiting(50, 100, 0, 50, 0)).toBe(true);
  expect(p.isWorthWaiting(50, 100, 0, 65, 0)).toBe(false);
  expect(p.isWorthWaiting(7, 225, 0, 19, 0)).toBe(true); // the first of a large batch
  expect(new LoadPlanner(16, 5_000, 'always').isWorthWaiting(0, 100, 0, 1_000, 0)).toBe(true);
});

it('what usually passes before the first block comes says nothing of the rest, up to a quarter of the time to compute', () => {
  const p = planner();
  prefill(p, 480, 9_000);
  const givenUpMs = (ready: number): number => {
    let ms = 3;
    while (p.isWorthWaiting(ready, 30, 0, ms, 0)) ms += 0.25;
    return ms;
  };
  expect([givenUpMs(0), givenUpMs(2)]).toEqual([3.75, 3.25]);
  for (let i = 0; i < 20; i++) p.observeStart(2_000);
  expect([givenUpMs(0), givenUpMs(2)]).toEqual([5.75, 5.25]);
  for (let i = 0; i < 100; i++) p.observeStart(500_000);
  expect([givenUpMs(0), givenUpMs(2)]).toEqual([6, 5.5]);
});

it('loads whatever it costs where it is told to', () => {
  const p = new LoadPlanner(16, 5_000, 'always');
  prefill(p, 1_600, 100);
  expect(p.plan({ spans: [{ tier: 'peer', count: 60 }], estimatedUs: 4_000_000 }, 0).blocks).toBe(60);
  expect(p.deadlineMs(60)).toBe(5_000);
});

it('the deadline follows the time to compute, within bounds', () => {
  const p = planner();
  expect(p.deadlineMs(10)).toBe(5_000);
  expect(p.lookupDeadlineMs(10)).toBe(500);
  prefill(p, 160, 100_000); // 10 ms per block
  expect(p.deadlineMs(1)).toBe(250);
  expect(p.deadlineMs(100)).toBe(1_000);
  expect(p.deadlineMs(100_000)).toBe(5_000);
  expect([1, 100, 100_000].map((blocks) => p.lookupDeadlineMs(blocks))).toEqual([100, 200, 500]);
  expect(new LoadPlanner(16, 5_000, 'always').lookupDeadlineMs(1)).toBe(5_000);
});

it('property: no plan is slower than computing, by the planner’s own numbers', () => {
  const us = fc.double({ min: 0, max: 1e7, noNaN: true });
  const span = fc.record({ tier: fc.constantFrom('arena', 'disk', 'redis'), count: fc.integer({ min: 1, max: 500 }) });
  fc.assert(
    fc.property(
      fc.array(fc.tuple(fc.constantFrom('prefill', 'copy', 'trip', 'load'), fc.integer({ min: 1, max: 4_000 }), us)),
      fc.array(span, { maxLength: 6 }),
      us,
      fc.nat(10_000),
      (observations, spans, estimatedUs, first) => {
        const p = planner();
        const loaded = (blocks: number): Plan => ({
          ...{ head: 0, blocks, loadUs: 1_000, computeUs: 0 },
          away: { tiers: 'disk', blocks, us: 1_000 },
        });
        for (const [kind, count, elapsedUs] of observations) {
          if (kind === 'prefill') prefill(p, count, elapsedUs);
          else if (kind === 'copy') p.observeCopy(count, elapsedUs, 0);
          else if (kind === 'trip') p.observeRoundTrip(elapsedUs, 0);
          else p.observeLoad(loaded(count), count, elapsedUs, 0);
        }
        const held = spans.reduce((sum, { count }) => sum + count, 0);
        const computeAll = p.computeUs(held, first);
        const plan = p.plan({ spans, estimatedUs }, 0, first);
        expect(plan.blocks).toBeLessThanOrEqual(held);
        expect(plan.loadUs).toBeLessThanOrEqual(5_000_000 * (1 + 1e-12));
        if (computeAll !== undefined) {
          expect(plan.loadUs + plan.computeUs).toBeLessThanOrEqual(computeAll * (1 + 1e-12));
          // and no end of a span would have been better
          let blocks = 0;
          for (const { count } of spans) {
            blocks += count;
            const copy = p.plan({ spans: [{ tier: 'arena', count: blocks }], estimatedUs: 0 }, 0, first);
            expect(copy.loadUs + copy.computeUs).toBeLessThanOrEqual(p.computeUs(blocks, first)! * (1 + 1e-12));
          }
        }
      },
    ),
    { numRuns: 2_000, examples: [[[['trip', 1, 5_000_001]], [{ tier: 'arena', count: 1 }], 0, 0]] },
  );
});
