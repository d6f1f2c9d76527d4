import * as fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { LastAnswers } from './last-answers.ts';
import type { WorkerState } from './policy.ts';

/** A step takes 10 ms, one that is full of prompts 100. */
const busy = {
  ...{ waiting: 0, running: 1, tokensAhead: 0, loadAheadS: 0 },
  ...{ prefillTokensPerS: 20_000, maxStepTokens: 2_000, stepS: 0.01, stepPerRequestS: 0 },
} as WorkerState;
const workers = (count: number, ...first: WorkerState[]): WorkerState[] => [
  ...first,
  ...new Array<WorkerState>(count - first.length).fill(busy),
];

describe('workers that are left to their answers', () => {
  it('are those whose answer runs on for longer than the others have to do', () => {
    const answers = new LastAnswers();
    answers.gives(0, busy, 0, 1_000, 0, 0);
    // 10 s are left. 27 s of prompts are 9 s for each of the three others, and the last answer is 1 s.
    expect(answers.alone(workers(4), 27, 100, 0)).toEqual([]);
    expect(answers.alone(workers(4), 26.9, 100, 0)).toEqual([0]);
    // What the others have ahead counts, what the worker itself has does not.
    const ahead = { ...busy, tokensAhead: 20_000 };
    expect(answers.alone(workers(4, busy, ahead), 26.1, 100, 0)).toEqual([]);
    expect(answers.alone(workers(4, busy, ahead), 25.9, 100, 0)).toEqual([0]);
    expect(answers.alone(workers(4, ahead), 26.9, 100, 0)).toEqual([0]);
  });

  it('have their answers behind them as far as there was time: a step a token, and the slower the more prompts came with it', () => {
    const answers = new LastAnswers();
    answers.gives(0, busy, 1, 1_000, 2, 0);
    // It begins after 2 s; at 6 s, 400 tokens are there.
    expect([17.9, 18.1].map((queuedS) => answers.alone(workers(4), queuedS, 0, 6_000))).toEqual([[0], []]);
    // 2 s of prompts since: 20 tokens in these, 200 in the 2 s beside them.
    answers.gives(0, busy, 2, 10, 0, 6_000);
    expect([23.3, 23.5].map((queuedS) => answers.alone(workers(4), queuedS, 0, 6_000))).toEqual([[0], []]);
    // One of them is still ahead.
    const ahead = { ...busy, tokensAhead: 20_000 };
    expect([20.6, 20.8].map((queuedS) => answers.alone(workers(4, ahead), queuedS, 0, 6_000))).toEqual([[0], []]);
    // A longer one than what is left of it is the longest from then on.
    answers.gives(0, busy, 0, 781, 0, 6_000);
    expect([23.4, 23.5].map((queuedS) => answers.alone(workers(4), queuedS, 0, 6_000))).toEqual([[0], []]);
  });

  it('are none that has nothing to do, or stands for another one', () => {
    const answers = new LastAnswers();
    for (const number of [0, 1]) answers.gives(number, busy, 0, 1_000 - number, 0, 0);
    expect(answers.alone(workers(8), 1, 0, 0)).toEqual([0, 1]);
    expect(answers.alone(workers(8, { ...busy, running: 0 }), 1, 0, 0)).toEqual([1]);
    answers.left(1);
    expect(answers.alone(workers(8), 1, 0, 0)).toEqual([0]);
  });

  it('are a quarter of all at most, those with the longest answers', () => {
    const all = fc.array(fc.nat(100_000), { minLength: 1, maxLength: 12 });
    fc.assert(
      fc.property(all, fc.nat(100), fc.nat(1_000), (tokens, queuedS, longest) => {
        const answers = new LastAnswers();
        tokens.forEach((count, number) => {
          answers.gives(number, busy, 0, count, 0, 0);
        });
        const alone = answers.alone(workers(tokens.length), queuedS, longest, 0);
        expect(alone.length).toBeLessThanOrEqual(tokens.length / 4);
        const least = Math.min(...alone.map((number) => tokens[number]!));
        const others = tokens.filter((_, number) => !alone.includes(number));
        if (alone.length > 0) expect(least).toBeGreaterThanOrEqual(Math.max(...others));
        // Each of them runs on for longer than it takes the others without it.
        for (const number of alone)
          expect(tokens[number]! / 100).toBeGreaterThan(queuedS / (tokens.length - 1) + longest / 100);
      }),
    );
  });
});
