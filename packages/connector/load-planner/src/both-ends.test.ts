/** Where head and load meet: the best of all places, only where it pays, and moved by what steps and loads beside each other took. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { BothEnds, type EndCosts } from './both-ends.ts';
import { positionsOf } from './compute-model.ts';
import { Experiences } from './experience.ts';
import type { Span } from './plan.ts';
import { LoadPlanner } from './planner.ts';

const us = fc.integer({ min: 0, max: 5_000 });

it('meets at the best of all places, or one after the other is nearly as good', () => {
  fc.assert(
    fc.property(
      fc.record({
        spans: fc.array(
          fc.record({ tier: fc.constantFrom('arena', 'peer', 'disk'), count: fc.integer({ min: 1, max: 12 }) }),
          { maxLength: 5 },
        ),
        eachUs: fc.array(us, { minLength: 60, maxLength: 60 }),
        costs: fc.record({ roundTripUs: us, copyUs: us, awayUs: us, restUs: us, bestUs: fc.nat(300_000) }),
        mostLoadUs: fc.constantFrom(20_000, Number.POSITIVE_INFINITY),
        slowed: fc.double({ min: 0.5, max: 3, noNaN: true }),
      }),
      ({ spans, eachUs, costs: some, mostLoadUs, slowed }) => {
        const ends = new BothEnds(new Experiences());
        ends.observeStep(1_000, slowed * 1_000, 0);
        const computeUs = (blocks: number): number => eachUs.slice(0, blocks).reduce((sum, one) => sum + one, 0);
        const costs: EndCosts = { ...some, lastCopied: 4, computeUs, mostLoadUs };
        const tiers = spans.flatMap(({ tier, count }: Span) => Array.from({ length: count }, () => tier));
        let least = Number.POSITIVE_INFINITY;
        for (let head = 1; head < tiers.length; head++) {
          const rest = tiers.slice(head);
          const away = rest.filter((tier) => tier !== 'arena').length;
          const loadUs =
            costs.roundTripUs +
            (rest.length - away) * costs.copyUs +
            away * costs.awayUs +
            Math.min(4, away) * costs.copyUs;
          if (loadUs <= mostLoadUs) least = Math.min(least, Math.max(slowed * computeUs(head), loadUs));
        }
        const plan = ends.plan(spans, costs, 0);
        if (plan === undefined) {
          // A deadline on loads can hide the place where both take as long: then there is none.
          if (mostLoadUs === Number.POSITIVE_INFINITY)
            expect(least + costs.restUs).toBeGreaterThanOrEqual(0.9 * costs.bestUs - 1e-6);
          return;
        }
        expect(plan.head).toBeGreaterThan(0);
        expect(plan.head).toBeLessThan(tiers.length);
        expect(Math.max(plan.headUs, plan.loadUs)).toBeCloseTo(least, 3);
        expect(plan.loadUs).toBeLessThanOrEqual(mostLoadUs);
        expect(least + costs.restUs).toBeLessThan(0.9 * costs.bestUs);
        expect(plan.away.blocks).toBe(tiers.slice(plan.head).filter((tier) => tier !== 'arena').length);
      },
    ),
  );
});

/** A step over the first `tokens` tokens, 50 µs each. */
const prefill = (planner: LoadPlanner, tokens: number): void =>
  planner.observePrefill(tokens, positionsOf(0, tokens), tokens * 50);

const hit = { spans: [{ tier: 'peer', count: 60 }], estimatedUs: 48_000 };

function measured(): LoadPlanner {
  const planner = new LoadPlanner(16, 5_000);
  for (const tokens of [960, 480, 960, 480, 960]) prefill(planner, tokens);
  return planner;
}

it('computes half of what is loaded as fast, and nothing of it while others compute', () => {
  const planner = measured();
  expect(planner.plan(hit, 0, 0, true)).toMatchObject({
    ...{ head: 30, blocks: 30, loadUs: 24_000 },
    away: { tiers: 'peer beside steps', blocks: 30, us: 24_000 },
  });
  expect(planner.plan(hit, 0, 0, false).head).toBe(0);
  expect(new LoadPlanner(16, 5_000).plan(hit, 0, 0, true)).toMatchObject({ head: 0, blocks: 60 });
  expect(new LoadPlanner(16, 5_000, 'always').plan(hit, 0, 0, true)).toMatchObject({ head: 0, blocks: 60 });
});

it('does not where one of both is clearly the faster', () => {
  const planner = measured();
  expect(planner.plan({ ...hit, estimatedUs: 4_800 }, 0, 0, true)).toMatchObject({ head: 0, blocks: 60 });
  expect(planner.plan({ ...hit, estimatedUs: 480_000 }, 0, 0, true)).toMatchObject({ head: 0, blocks: 0 });
  const near = { spans: [{ tier: 'arena', count: 60 }], estimatedUs: 0 };
  expect(planner.plan(near, 0, 0, true)).toMatchObject({ head: 0, blocks: 60 });
});

it('learns how steps and loads slow each other down, and forgets it', () => {
  const planner = measured();
  // The step took as long again, the load half as long again.
  const plan = planner.plan(hit, 0, 0, true);
  planner.observeHead(480, positionsOf(0, 480), 48_000, 0);
  planner.observeLoad(plan, 30, 36_000, 0);
  expect(planner.plan(hit, 0, 0, true)).toMatchObject({ head: 26, blocks: 34, loadUs: 34 * 1_200 });
  expect(planner.plan(hit, 40_000, 0, true).head).toBe(30);
  // What the steps took says nothing of steps alone.
  expect(planner.computeUs(30)).toBeCloseTo(24_000, 3);
});

it('does not give the load up before its head is computed, and then by what is left', () => {
  const planner = measured();
  planner.observeRoundTrip(0);
  expect(planner.isWorthWaiting(0, 30, 30, 20, 30)).toBe(true); // ms: the head takes 24
  expect(planner.isWorthWaiting(0, 30, 30, 20, 0)).toBe(false);
  expect(planner.isWorthWaiting(0, 30, 30, 25, 30)).toBe(false);
  expect(planner.isWorthWaiting(24, 30, 30, 25, 30)).toBe(true);
});
