import fc from 'fast-check';
import { expect, it } from 'vitest';
import { AnswerLengths } from './answer-lengths.ts';

it('expects what the last 256 answers had on average, and never more than is allowed', () => {
  fc.assert(
    fc.property(
      fc.array(fc.nat(9_999), { minLength: 16, maxLength: 600 }),
      fc.integer({ min: 1, max: 9_999 }),
      (all, most) => {
        const answers = new AnswerLengths();
        for (const tokens of all) answers.ended(tokens);
        const last = all.slice(-256);
        const mean = Math.ceil(last.reduce((sum, tokens) => sum + tokens, 0) / last.length);
        expect(answers.expected(most)).toBe(Math.min(most, mean));
      },
    ),
  );
});

it('a few answers tell nothing', () => {
  const answers = new AnswerLengths();
  for (let i = 0; i < 15; i++) answers.ended(20);
  expect([answers.expected(99), answers.expected(99_999)]).toEqual([99, 1_024]);
  answers.ended(20);
  expect(answers.expected(99_999)).toBe(20);
});
