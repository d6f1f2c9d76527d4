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
      const right = 1_500 * Math.ceil((to - from) / 512) + 200 * (to - from) + 0.05 * positionsOf(from, to);
      expect(model.us(from, to)! / right).toBeCloseTo(1, 2);
    }
  });

  it('believes small steps only until it has seen larger ones', () => {
    const model = new ComputeModel();
    expect(model.us(0, 100)).toBeUndefined();
    model.observe(1, 1_000, 2_000);
    expect([model.steps, model.us(0, 100)]).toEqual([0, 200_000]);
    model.observe(512, positionsOf(0, 512), 51_200);
    // What the small one took is what a step costs itself.
    const us = 2_000 + (100 * (51_200 - 2_000)) / 512;
    expect([model.steps, model.us(0, 100)]).toEqual([1, us]);
    for (let i = 0; i < 100; i++) model.observe(1, 1_000, 2_000);
    expect(model.us(0, 100)! / us).toBeCloseTo(1, 1);
  });

  it('follows a machine that becomes slower', () => {
    const model = new ComputeModel();
    prompt(model, 8_192, (tokens) => 100 * tokens);
    for (let i = 0; i < 5; i++) prompt(model, 8_192, (tokens) => 300 * tokens);
    expect(model.us(0, 1_000)! / 300_000).toBeCloseTo(1, 1);
  });

  it('does not believe a single step that was disturbed, but two in a row', () => {
    const model = new ComputeModel();
    for (let i = 0; i < 5; i++) prompt(model, 4_096, (tokens) => 100 * tokens);
    model.observe(512, positionsOf(0, 512), 512_000);
    expect(model.us(0, 1_000)! / 100_000).toBeLessThan(1.05);
    model.observe(512, positionsOf(512, 1_024), 512_000);
    expect(model.us(0, 1_000)! / 100_000).toBeGreaterThan(1.3);
  });

  it('learns what a step costs itself, though the first ones are slow', () => {
    const model = new ComputeModel();
    for (const us of [9_400, 5_100]) model.observe(1, 480, us);
    for (let i = 0; i < 4; i++) for (const context of [480, 3_840]) model.observe(1, context, 1_000 + 0.4 * context);
    model.observe(1, 480, 18_000); // disturbed
    for (const context of [480, 1_920, 3_840])
      expect(model.stepUs(context) / (1_000 + 0.4 * context)).toBeCloseTo(1, 0);
  });

  it('property: of prompts like those seen it says what they took, whatever steps cost, and again when the machine is slower', () => {
    const between = (min: number, max: number) => fc.double({ min, max, noNaN: true });
    const lengths = fc.array(fc.integer({ min: 8, max: 512 }), { minLength: 2, maxLength: 3 });
    const engine = fc.record({
      base: between(100, 5_000),
      perContext: between(0, 1),
      perToken: between(20, 500),
      perPosition: between(0, 0.05),
      factor: between(0.4, 3),
      blocks: lengths,
    });
    fc.assert(
      fc.property(engine, ({ base, perContext, perToken, perPosition, factor, blocks }) => {
        const model = new ComputeModel();
        let speed = 1;
        const own = (context: number): number => speed * (base + perContext * context);
        const took = (from: number, to: number): number =>
          own(to) + speed * (perToken * (to - from) + perPosition * positionsOf(from, to));
        const ask = (tokens: number): number => {
          let us = 0;
          for (let from = 0; from < tokens; from += 512) {
            const to = Math.min(tokens, from + 512);
            us += took(from, to);
            model.observe(to - from, positionsOf(from, to), took(from, to));
          }
          return us;
        };
        for (const now of [1, factor]) {
          speed = now;
          for (let round = 0; round < 12; round++) {
            for (const count of blocks) {
              const us = ask(16 * count);
              model.observe(1, 16 * count, took(16 * count - 1, 16 * count)); // the same prompt, imported
              if (round < 11) continue;
              expect(Math.abs(model.us(0, 16 * count)! / us - 1)).toBeLessThan(0.08);
              expect(Math.abs(model.stepUs(16 * count) - own(16 * count))).toBeLessThan(
                0.1 * own(16 * count) + 0.01 * us,
              );
            }
          }
        }
      }),
      { numRuns: 300 },
    );
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
