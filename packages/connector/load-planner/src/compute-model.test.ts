/** What an engine's steps say of how long it computes. */
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { ComputeModel, positionsOf } from './compute-model.ts';

/** A prompt in steps of at most 512 tokens, which cost what `cost` says. */
function prompt(model: ComputeModel, tokens: number, cost: (tokens: number, positions: number) => number): void {
  for (let from = 0; from < tokens; from += 512) {
    const to = Math.min(tokens, from + 512);
    model.observe(to - from, positionsOf(from, to), cost(to - from, positionsOf(from, to)));
  }
}

describe('the model of computing', () => {
  it('counts what each token looks at', () => {
    expect(positionsOf(0, 3)).toBe(1 + 2 + 3);
    expect(positionsOf(10, 12)).toBe(11 + 12);
    expect(positionsOf(5, 5)).toBe(0);
  });

  it('tells tokens, positions and the step itself apart', () => {
    const model = new ComputeModel();
    const cost = (tokens: number, positions: number): number => 1_500 + 200 * tokens + 0.05 * positions;
    for (let round = 0; round < 30; round++) {
      prompt(model, 4_096, cost);
      for (let i = 0; i < 4; i++) model.observe(1, 4_096, cost(1, 4_096)); // what imports leave
    }
    for (const [from, to] of [
      [0, 500],
      [0, 8_000],
      [3_000, 4_000],
    ] as const) {
      const right = 200 * (to - from) + 0.05 * positionsOf(from, to);
      expect(model.us(from, to)! / right).toBeCloseTo(1, 2);
    }
  });

  it('believes small steps only until it has seen larger ones', () => {
    const model = new ComputeModel();
    expect(model.us(0, 100)).toBeUndefined();
    model.observe(1, 1_000, 2_000);
    expect([model.steps, model.us(0, 100)]).toEqual([0, 200_000]);
    model.observe(512, positionsOf(0, 512), 51_200);
    expect([model.steps, model.us(0, 100)]).toEqual([1, 10_000]);
    for (let i = 0; i < 100; i++) model.observe(1, 1_000, 2_000);
    expect(model.us(0, 100)).toBe(10_000);
  });

  it('follows a machine that becomes slower', () => {
    const model = new ComputeModel();
    prompt(model, 8_192, (tokens) => 100 * tokens);
    for (let i = 0; i < 5; i++) prompt(model, 8_192, (tokens) => 300 * tokens);
    expect(model.us(0, 1_000)! / 300_000).toBeCloseTo(1, 1);
  });

  it('property: is never below zero, and never less for more, whatever was seen', () => {
    const step = fc.tuple(
      fc.integer({ min: 1, max: 4_096 }),
      fc.nat(100_000),
      fc.double({ min: 0, max: 1e9, noNaN: true }),
    );
    fc.assert(
      fc.property(fc.array(step, { maxLength: 40 }), fc.nat(10_000), fc.nat(10_000), (steps, from, tokens) => {
        const model = new ComputeModel();
        for (const [count, before, us] of steps) model.observe(count, positionsOf(before, before + count), us);
        const us = model.us(from, from + tokens);
        if (us === undefined) return;
        expect(us).toBeGreaterThanOrEqual(0);
        expect(Number.isFinite(us)).toBe(true);
        expect(model.us(from, from + tokens + 100)!).toBeGreaterThanOrEqual(us);
      }),
      { numRuns: 500 },
    );
  });
});
