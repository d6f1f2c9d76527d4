/** What is refused of streams: errors, answers that stand still, tokens that are missing; and a slow run that is honest is not. */
import { expect, it } from 'vitest';
import { checkWhole, stillMsAt } from './whole.ts';

const asked = { clients: 1_000, tokensPerS: 5, seconds: 20 };
const whole = { tokens: 100_000, errors: {}, hanging: 0 };
const checked = (told: Partial<typeof whole>) => () => checkWhole('through it', { ...whole, ...told }, asked);

it('a slow run gets fewer tokens than its clients asked for, and passes', () => {
  expect(checked({ tokens: 102_000 })).not.toThrow();
  expect(checked({ tokens: 50_000 })).not.toThrow();
});

it.each([
  [{ tokens: 49_999 }, '49999 tokens came of 100000; where none hangs ask for less with --clients or --rate'],
  [{ hanging: 100 }, 'of 1000 answers 100 stood still at the end, for 4 s and longer'],
  [{ errors: { cut: 2 } }, '{"cut":2}'],
  [
    { tokens: 0, errors: { 'status 503': 9 }, hanging: 991 },
    '{"status 503":9}; of 1000 answers 991 stood still at the end, for 4 s and longer; 0 tokens came of 100000; where none hangs ask for less with --clients or --rate',
  ],
])('%j is refused', (told, why) => {
  expect(checked(told)).toThrow(expect.objectContaining({ code: 'IO', message: `bench streams, through it: ${why}` }));
});

it('an answer may stand still for ten steps of its engine, and two seconds', () => {
  expect([1, 5, 50].map(stillMsAt)).toEqual([12_000, 4_000, 2_200]);
});
