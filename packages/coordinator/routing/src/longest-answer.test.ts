import { expect, it } from 'vitest';
import { LongestAnswer } from './longest-answer.ts';
import type { WorkerState } from './policy.ts';

/** Its steps take 10 ms, and 10 more for the 10 that run. */
const worker = { stepS: 0.01, stepPerRequestS: 0.001, running: 10 } as WorkerState;

it('an answer must begin where it takes longer than all that was begun and all that waits', () => {
  const longest = new LongestAnswer();
  // How long a token takes nobody has told.
  expect(longest.mustBegin(1_000, 0, 0)).toBe(false);
  longest.begins(100, [worker, worker], 0);
  // Begun: 2 s from 0 on.
  expect([110, 111].map((tokens) => longest.mustBegin(tokens, 0, 0))).toEqual([false, true]);
  expect([55, 56].map((tokens) => longest.mustBegin(tokens, 0, 1_000))).toEqual([false, true]);
  expect([220, 221].map((tokens) => longest.mustBegin(tokens, 4_000, 0))).toEqual([false, true]);
});
