import { expect, it } from 'vitest';
import { LongestRequest } from './longest-request.ts';
import type { WorkerState } from './policy.ts';

/** Its steps take 10 ms, and 10 more for the 10 that run. */
const worker = { stepS: 0.01, stepPerRequestS: 0.001, running: 10 } as WorkerState;

const longest = new LongestRequest();
longest.begins(1_000, 50, [worker, worker], 0);
/** Begun: 2 s from 0 on. */
const must = (promptMs: number[], tokens: number, queuedMs: number, nowMs: number, haveEnded = false): boolean[] =>
  promptMs.map((ms) => longest.mustBegin(ms, tokens, queuedMs, nowMs, haveEnded));

it('a request must begin where it takes five times as long as all that was begun and all that waits', () => {
  expect(longest.takesMs(300, 5)).toBe(400);
  expect(must([9_000, 9_001], 50, 1_000, 0)).toEqual([false, true]);
  expect(must([4_000, 4_001], 50, 1_000, 1_000)).toEqual([false, true]);
  expect(must([19_000, 19_001], 50, 4_000, 0)).toEqual([false, true]);
});

it('not a prompt that begins soon in any case', () => {
  expect(must([31_999, 32_000], 0, 1_000, 0)).toEqual([true, false]);
  expect(must([0], 1_000, 1, 0)).toEqual([true]);
});

it('once nobody comes any more, one that takes longer than all others', () => {
  expect(must([4_000, 4_001], 0, 4_000, 0, true)).toEqual([false, true]);
  expect(must([99_999], 0, 0, 0, true)).toEqual([true]);
});
