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
            expect(least + costs.restUs).toBeGreaterThanOrEqual(0.8 * costs.bestUs - 1e-6);
          return;
        }
        expect(plan.head).toBeGreaterThan(0);
        expect(plan.head).toBeLessThan(tiers.length);
        expect(Math.max(plan.headUs, plan.loadUs)).toBeCloseTo(least, 3);
        expect(plan.loadUs).toBeLessThanOrEqual(mostLoadUs);
        expect(least + costs.restUs).toBeLessThan(0.8 * costs.bestUs);
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

it('always computes half of what is brought where it is told to, and asks for it', () => {
  const planner = new LoadPlanner(16, 5_000, 'halves');
  const halved = { head: 30, blocks: 30 };
  expect(planner.plan(hit, 0, 0, true)).toMatchObject(halved);
  for (const tokens of [960, 480, 960, 480, 960]) prefill(planner, tokens);
  for (const estimatedUs of [0, 4_800, 48_000, 480_000, 48_000_000]) {
    expect(planner.plan({ ...hit, estimatedUs }, 0, 0, true)).toMatchObject(halved);
    expect([planner.isWorthAsking(60, 0, 0, true), planner.lookupDeadlineMs(60)]).toEqual([true, 5_000]);
  }
  const near = { spans: [{ tier: 'arena', count: 60 }], estimatedUs: 0 };
  expect(planner.plan(near, 0, 0, true)).toMatchObject({ head: 0, blocks: 60 });
  expect(planner.plan(hit, 0, 0, false).head).toBe(0);
});

it('learns how steps and loads slow each other down, and forgets it', () => {
  const planner = measured();
  // The step took as long again, the load half as long again.
  const plan = planner.plan(hit, 0, 0, true);
  planner.observeHead(480, positionsOf(0, 480), 48_000, 0);
  planner.observeLoad(plan, 30, 36_000, 0);
  expect(planner.plan(hit, 0, 0, true).head).toBe(0); // 26 blocks at 1.6 ms beside 34 at 1.2 would save an eighth
  expect(planner.plan(hit, 40_000, 0, true).head).toBe(30);
  // What the steps took says nothing of steps alone.
  expect(planner.computeUs(30)).toBeCloseTo(24_000, 3);
});

it('sees that the executor has become faster, though all of its steps are heads', () => {
  const planner = measured();
  const planned = (): number => {
    const { head, loadUs, computeUs } = planner.plan(hit, 0, 0, true);
    if (head > 0) planner.observeHead(head * 16, positionsOf(0, head * 16), head * 80, 0); // ten times as fast
    return loadUs + computeUs;
  };
  for (let at = 0; at < 12; at++) planned();
  expect(planned()).toBeLessThan(4_800 * 1.1);
});

it('sees that a tier has become faster, though all of its loads are beside steps', () => {
  const planner = measured();
  let estimatedUs = 48_000;
  for (let at = 0; at < 20; at++) {
    const plan = planner.plan({ ...hit, estimatedUs }, at, 0, true);
    planner.observeLoad(plan, plan.blocks, plan.blocks * 80, at);
    estimatedUs += (4_800 - estimatedUs) / 8; // the node learns from the same loads
  }
  expect(planner.plan({ ...hit, estimatedUs }, 20, 0, true)).toMatchObject({ head: 0, blocks: 60 });
});

/** What is true of link and executor, µs a block, and by how much each slows the other down. */
interface Truth {
  readonly computeUs: number;
  readonly loadUs: number;
  readonly stepsSlowed: number;
  readonly loadsSlowed: number;
}

const blocks = 60;

/** A prompt whose blocks are all held elsewhere: the planner decides, learns, and the time is told. µs */
function served(planner: LoadPlanner, saidUs: number, truth: Truth, nowMs: number): number {
  const { computeUs, stepsSlowed } = truth;
  const span = { spans: [{ tier: 'peer', count: blocks }], estimatedUs: saidUs * blocks };
  const plan = planner.plan(span, nowMs, 0, true);
  const [first, count] = [plan.head, plan.blocks];
  const eachUs = truth.loadUs * (first > 0 ? truth.loadsSlowed : 1);
  const headUs = first * computeUs * stepsSlowed;
  if (first > 0) planner.observeHead(first * 16, positionsOf(0, first * 16), headUs, nowMs);
  let [ready, looks, nowUs] = [0, 0, 0];
  let isGivenUp = false;
  const judgeUs = (planner.judgeAfterMs(count, first) ?? Number.POSITIVE_INFINITY) * 1_000;
  while (ready < count && !isGivenUp) {
    const cameUs = (ready + 1) * eachUs;
    const lookUs = (looks + 1) * judgeUs;
    nowUs = Math.min(cameUs, lookUs);
    if (nowUs === cameUs) ready++;
    else looks++;
    isGivenUp = nowUs >= headUs && !planner.isWorthWaiting(ready, count, first, nowUs / 1_000, nowUs / 1_000);
  }
  if (count > 0 && (ready === count || nowUs > plan.loadUs || first > 0))
    planner.observeLoad(plan, ready, nowUs, nowMs);
  const rest = blocks - first - ready;
  if (rest * 16 >= 64)
    planner.observePrefill(rest * 16, positionsOf((first + ready) * 16, blocks * 16), rest * computeUs);
  return Math.max(headUs, nowUs) + rest * computeUs;
}

it('is soon no more than a fifth slower than the better of both, and mostly faster, whatever the node says and however they slow each other', () => {
  const each = fc.double({ min: 250, max: 4_000, noNaN: true });
  const slowed = fc.double({ min: 1, max: 1.6, noNaN: true });
  const ratios: number[] = [];
  fc.assert(
    fc.property(
      fc.record({ computeUs: each, loadUs: each, stepsSlowed: slowed, loadsSlowed: slowed }),
      fc.double({ min: 0.1, max: 10, noNaN: true }),
      (truth, wrong) => {
        const planner = new LoadPlanner(16, 5_000);
        for (const tokens of [960, 480, 960]) {
          const us = (tokens / 16) * truth.computeUs;
          planner.observePrefill(tokens, positionsOf(0, tokens), us);
        }
        let saidUs = truth.loadUs * wrong;
        const times: number[] = [];
        for (let at = 0; at < 40; at++) {
          times.push(served(planner, saidUs, truth, at * 100));
          saidUs += (truth.loadUs - saidUs) / 8; // the node learns from the same loads
        }
        const better = blocks * Math.min(truth.computeUs, truth.loadUs);
        const late = times.slice(20).reduce((sum, us) => sum + us, 0) / 20;
        ratios.push(late / better);
        expect(late).toBeLessThan(better * 1.2);
        expect(Math.max(...times)).toBeLessThan(blocks * truth.computeUs * 2);
      },
    ),
    { numRuns: 500 },
  );
  const mean = ratios.reduce((sum, one) => sum + one, 0) / ratios.length;
  expect(mean).toBeLessThan(0.96);
});
