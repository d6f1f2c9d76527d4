/** What a request adds to a step, of pods of one speed and of several. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { StepLine } from './step-line.ts';

/** A pod whose steps take `base` + `each` × requests. */
function podOf(base: number, each: number, requests: readonly number[]): StepLine {
  const line = new StepLine();
  for (let i = 0; i < 40; i++) {
    const n = requests[i % requests.length]!;
    line.add(n, base + each * n);
  }
  return line;
}

it('a fast pod with many requests beside a slow one with few is no reason to think that requests cost nothing', () => {
  const [fast, slow] = [podOf(0.01, 0.0003, [28, 36]), podOf(0.025, 0.001, [4, 12])];
  expect(StepLine.slopeOf([fast, slow])).toBeCloseTo(0.00065, 9);
  // Always as many: the line through both falls, and so says nothing.
  expect(StepLine.slopeOf([podOf(0.01, 0.0003, [32]), podOf(0.025, 0.001, [8])])).toBe(0);
});

it('pods of one speed say it, each by itself, or few here and many there', () => {
  const numbers = fc.array(fc.integer({ min: 1, max: 64 }), { minLength: 1, maxLength: 5 });
  const pods = fc.array(numbers, { minLength: 1, maxLength: 5 });
  fc.assert(
    fc.property(pods, fc.double({ min: 1e-4, max: 1e-2, noNaN: true }), (all, each) => {
      const slope = StepLine.slopeOf(all.map((requests) => podOf(0.01, each, requests)));
      if (slope > 0) expect(slope).toBeCloseTo(each, 9);
      // 0 is for those that hardly differ.
      else expect(Math.max(...all.flat()) / Math.min(...all.flat())).toBeLessThan(2);
    }),
  );
});

it('what adds nothing is nearly nothing, and not unknown', () => {
  const slope = podOf(0.02, 0, [1, 30]).slope;
  expect(slope).toBeCloseTo(2e-6, 12);
  expect(new StepLine().slope).toBe(0);
});
