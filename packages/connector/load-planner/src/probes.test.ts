import fc from 'fast-check';
import { expect, it } from 'vitest';
import { ComputeModel, positionsOf, reaches, reachOf } from './compute-model.ts';
import type { Plan } from './plan.ts';
import { LoadPlanner } from './planner.ts';
import { Probes } from './probes.ts';

const blockTokens = 16;

/** A step over tokens `from` to `to` of a prompt, `perTokenUs` each. */
const step = (model: ComputeModel | LoadPlanner, from: number, to: number, perTokenUs: number): void => {
  const [tokens, positions] = [to - from, positionsOf(from, to)];
  if (model instanceof ComputeModel) model.observe(tokens, positions, tokens * perTokenUs);
  else model.observePrefill(tokens, positions, tokens * perTokenUs);
};

const whole = (blocks: number, loadUs: number): Plan => ({
  ...{ head: 0, blocks, loadUs, computeUs: 0 },
  away: { tiers: 'peer', blocks, us: loadUs },
});

it('computes one step of a long prompt, and all of a short one', () => {
  const model = new ComputeModel();
  const probes = new Probes(model, blockTokens);
  const next = (plan: Plan, nowMs: number): Plan => {
    for (let at = 0; at < 1_000; at++) {
      const probe = probes.next(plan, 0, nowMs + at * 100);
      if (probe !== plan) return probe;
    }
    throw new Error('no probe');
  };
  for (let from = 0; from < 3_840; from += 512) step(model, from, Math.min(3_840, from + 512), 100);
  expect(next(whole(240, 200_000), 5_000)).toEqual({
    ...{ head: 0, blocks: 209, loadUs: (200_000 * 209) / 240, computeUs: expect.closeTo(31 * 16 * 100, 3) },
    away: { tiers: 'peer', blocks: 209, us: (200_000 * 209) / 240 },
    isProbe: true,
  });
  expect(next(whole(30, 25_000), 200_000)).toMatchObject({ blocks: 0, loadUs: 0, away: { blocks: 0, us: 0 } });
});

it('property: probes cost no more than their share and the first look, by the planner’s own numbers', () => {
  const call = fc.record({
    blocks: fc.integer({ min: 1, max: 400 }),
    /** Of the time to compute it. */
    loads: fc.double({ min: 0.02, max: 1, noNaN: true }),
    afterMs: fc.nat(5_000),
    /** What is computed then: a probe, or another prompt beside it, of this many blocks. */
    computed: fc.option(fc.integer({ min: 4, max: 200 })),
    perTokenUs: fc.integer({ min: 20, max: 500 }),
  });
  fc.assert(
    fc.property(fc.array(call, { minLength: 1, maxLength: 200 }), (calls) => {
      const model = new ComputeModel();
      const probes = new Probes(model, blockTokens);
      step(model, 0, 480, 100);
      const totals = Array.from({ length: reaches }, () => ({ planUs: 0, costUs: 0, firstUs: 0 }));
      let nowMs = 0;
      for (const { blocks, loads, afterMs, computed, perTokenUs } of calls) {
        nowMs += afterMs;
        const plan = whole(blocks, model.us(0, blocks * blockTokens)! * loads);
        const reach = reachOf((blocks / 2) * blockTokens);
        const isFirst = model.stepsOf(reach) === 0;
        const probe = probes.next(plan, 0, nowMs);
        const costUs = probe.loadUs + probe.computeUs - plan.loadUs;
        const total = totals[reach]!;
        total.planUs += plan.loadUs;
        total.costUs += Math.max(0, costUs);
        if (isFirst && costUs > 0) total.firstUs = Math.max(total.firstUs, costUs);
        expect(total.costUs).toBeLessThanOrEqual(total.firstUs + total.planUs / 64 + 1e-6);
        if (probe !== plan) step(model, probe.blocks * blockTokens, blocks * blockTokens, perTokenUs);
        if (computed !== null) step(model, 0, computed * blockTokens, perTokenUs);
      }
    }),
    { numRuns: 300 },
  );
});

it('prompts of one reach that end elsewhere do not make each other look learned', () => {
  const planner = new LoadPlanner(blockTokens, 5_000);
  for (let from = 0; from < 3_000; from += 500) step(planner, from, from + 500, 40);
  for (let from = 0; from < 3_000; from += 500) step(planner, from, from + 100, 40);
  const ask = (first: number, blocks: number, nowMs: number) =>
    planner.plan({ spans: [{ tier: 'peer', count: blocks }], estimatedUs: blocks * 16 * 30 }, nowMs, first);
  let probes = 0;
  for (let at = 0; at < 1_000; at++) {
    if (ask(0, 180, at * 100).isProbe) probes++;
    if (ask(90, 30, at * 100 + 50).isProbe) probes++;
  }
  expect(probes).toBeGreaterThan(20);
});

it('an engine that becomes the faster of both is found out, and costs little until then', () => {
  for (const [beforeUs, afterUs] of [
    [60, 20],
    [40, 15],
    [33, 28],
  ] as const) {
    const planner = new LoadPlanner(blockTokens, 5_000);
    const hit = { spans: [{ tier: 'peer', count: 120 }], estimatedUs: 1_920 * 30 };
    const steps = (from: number, perTokenUs: number): void => {
      for (let at = from; at < 1_920; at += 480) step(planner, at, Math.min(1_920, at + 480), perTokenUs);
    };
    steps(0, beforeUs);
    const serve = (nowMs: number, perTokenUs: number): { us: number; loaded: number } => {
      const plan = planner.plan(hit, nowMs);
      const from = plan.blocks * blockTokens;
      if (from < 1_920) steps(from, perTokenUs);
      return { us: from * 30 + (1_920 - from) * perTokenUs, loaded: plan.blocks };
    };
    let us = 0;
    for (let at = 0; at < 1_000; at++) us += serve(at * 200, beforeUs).us;
    expect(us / 1_000).toBeLessThanOrEqual(1_920 * 30 * (1 + 1 / 64));
    const found = Array.from({ length: 200 }, (_, at) => serve(200_000 + at * 200, afterUs).loaded).indexOf(0);
    expect(found).toBeGreaterThanOrEqual(0);
    expect(found).toBeLessThan(120);
    expect(serve(300_000, afterUs).loaded).toBe(0);
  }
});
