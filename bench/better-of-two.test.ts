/** What a choice between two ways is measured by: noise makes no way better. */
import { expect, it } from 'vitest';
import { betterOfTwo, type Timed } from './better-of-two.ts';

/** Seeded; about normal, of deviation 1. */
function noise(seed: number): () => number {
  let state = seed;
  const uniform = (): number => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    return state / 2 ** 32;
  };
  return () => Array.from({ length: 12 }, uniform).reduce((sum, each) => sum + each, -6);
}

const rounds = (next: () => number, ms: readonly [chosen: number, a: number, b: number], count = 12): Timed[] =>
  Array.from({ length: count }, () => {
    const [chosen, a, b] = ms.map((each) => each * Math.exp(0.1 * next()));
    return { chosen: chosen!, ways: [a!, b!] };
  });

const mean = (values: readonly number[]): number => values.reduce((sum, each) => sum + each, 0) / values.length;

it('a choice that is as good as either of two equal ways is neither better nor worse', () => {
  const next = noise(7);
  const experiments = Array.from({ length: 2_000 }, () => rounds(next, [10, 10, 10]));
  expect(mean(experiments.map((each) => betterOfTwo(each).ratio))).toBeCloseTo(1, 2);
  // The same rounds for both questions: the better looks faster than it is.
  expect(mean(experiments.map((each) => betterOfTwo(each).strict))).toBeLessThan(0.99);
});

it('where one way is clearly better, the choice is compared with it', () => {
  const next = noise(11);
  for (const [ms, better, ratio] of [
    [[10, 10, 20], 0, 1],
    [[20, 20, 10], 1, 0.5],
    [[15, 30, 10], 1, 10 / 15],
  ] as const) {
    const experiments = Array.from({ length: 200 }, () => betterOfTwo(rounds(next, ms)));
    expect(new Set(experiments.map((each) => each.better))).toEqual(new Set([better]));
    expect(mean(experiments.map((each) => each.ratio)) / ratio).toBeCloseTo(1, 1);
  }
});

it('one round is compared with its own better', () => {
  expect(betterOfTwo([{ chosen: 2, ways: [4, 1] }])).toEqual({ better: 1, ratio: 0.5, strict: 0.5 });
});
