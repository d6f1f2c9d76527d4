/** The decision where a prompt takes longer than the decode side waits: how much of it is computed elsewhere, and who is lacking. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { decide } from './decision.ts';
import type { Question, Side } from './question.ts';
import { question, questions, side } from './testing/questions.ts';

const running = (count: number, part: Partial<Side> = {}): Side => side(0, { running: count, ...part });

it('no more is computed elsewhere than is there while the decode side waits for it', () => {
  const decode = running(30, { role: 'decode' });
  const of = (deadlineS: number, part: Partial<Question> = {}) =>
    decide(question({ tokens: 160_001, decode, deadlineS, ...part }));
  // 160 s of compute, and 31 blocks of the last step; a sixteenth takes ten.
  const blocksOf = (deadlineS: number) => of(deadlineS).split?.blocks;
  expect([blocksOf(160.1), blocksOf(160), blocksOf(60), blocksOf(50), blocksOf(10)]).toEqual([
    ...[10_000, 9_375, 3_125, 2_500, undefined],
  ]);
  expect(of(60)).toMatchObject({ reason: 'sooner', split: { arrivedS: expect.closeTo(50.031, 6) } });
  // An idle worker would not have been in time either: nobody is lacking. One with a queue is.
  expect(of(10)).toMatchObject({ reason: 'prefill-late', isLacking: false });
  const queued = { tokens: 1_601, others: [side(1, { tokensAhead: 60_001 })] };
  expect(of(60, queued)).toMatchObject({ reason: 'prefill-late', isLacking: true });
  expect(of(60, { others: [side(1, { tokensAhead: 60_001 }), side(2)] }).split?.prefill.name).toBe('w2');
});

it('always: where all is not there in time, as much as is, and none only where not even a sixteenth is', () => {
  const of = (deadlineS: number, ...others: Side[]) =>
    decide(question({ mode: 'always', tokens: 160_001, deadlineS, others }));
  const blocksOf = (deadlineS: number) => of(deadlineS, side(1)).split?.blocks;
  expect([blocksOf(160.1), blocksOf(160), blocksOf(60), blocksOf(10.1)]).toEqual([10_000, 9_375, 3_125, 625]);
  expect(of(60, side(1)).reason).toBe('always');
  expect(of(10, side(1))).toMatchObject({ reason: 'prefill-late', split: undefined });
  // Who computes all of it in time comes first, whatever it costs there.
  const fast = running(9, { ...side(2), prefillTokensPerS: 4_000 });
  expect(of(60, side(1), fast).split).toMatchObject({ blocks: 10_000, prefill: { name: 'w2' } });
});

it('whatever the figures: what is split is there in time, and always as much more of it the longer the wait', () => {
  const seconds = fc.double({ min: 0, max: 30, noNaN: true });
  fc.assert(
    fc.property(questions, seconds, seconds, (asked, a, b) => {
      const of = (mode: Question['mode'], deadlineS: number) => decide({ ...asked, mode, deadlineS }).split;
      for (const mode of ['predicted', 'always'] as const) expect(of(mode, a)?.awaitedS ?? 0).toBeLessThanOrEqual(a);
      const [less, more] = [Math.min(a, b), Math.max(a, b)].map((deadlineS) => of('always', deadlineS)?.blocks ?? 0);
      expect(less).toBeLessThanOrEqual(more!);
    }),
  );
});

it('the decode side waits from when it has its room: until then others are computed, and sent, but not this one', () => {
  // 944 blocks for prompt and answer: 300 more than are free, of which ten a second become so.
  const full = { running: 1, totalBlocks: 10_000, usedBlocks: 9_356, freedBlocksPerS: 10 };
  const of = (tokensAhead: number, part: Partial<Question> = {}) =>
    decide(
      question({
        ...{ mode: 'always', tokens: 15_001, decode: running(1, full), others: [side(1, { tokensAhead })] },
        ...{ deadlineS: 1_000, ...part },
      }),
    ).split!;
  // 14.992 s of compute, and 31 blocks of the last step. Behind a queue of 50 s it begins 20 s after there is room.
  const awaited = [0, 30_000, 50_000].map((tokensAhead) => of(tokensAhead).awaitedS);
  for (const [at, seconds] of [15.023, 15.023, 35.023].entries()) expect(awaited[at]).toBeCloseTo(seconds, 9);
  expect(of(50_000).arrivedS).toBeCloseTo(65.023, 9);
  expect([of(50_000, { deadlineS: 35.1 }).blocks, of(50_000, { deadlineS: 35 }).blocks]).toEqual([937, 879]);
  // 937 blocks, ten a second; those of others have 30 s.
  const slow = [0, 300, 400].map((pendingBlocks) => of(0, { linkBlocksPerS: 10, pendingBlocks }).awaitedS);
  for (const [at, seconds] of [93.7, 93.7, 103.7].entries()) expect(slow[at]).toBeCloseTo(seconds, 9);
});

it('lacking: also where an idle worker would have been asked for a part alone', () => {
  const decode = running(30, { role: 'decode' });
  const lacking = (deadlineS: number, part: Partial<Question> = {}) => {
    const { reason, isLacking } = decide(question({ tokens: 160_001, decode, deadlineS, others: [], ...part }));
    return [reason, isLacking];
  };
  const whys: [string, Partial<Question>][] = [
    ['no-prefill-worker', {}],
    ['no-prefill-worker', { mode: 'always' }],
    ['other-revision', { others: [side(1, { revision: 'v2' })] }],
    ['no-node', { others: [side(1, { node: null })] }],
    ['no-link', { others: [side(1)], links: new Set() }],
    ['prefill-too-small', { others: [side(1, { maxTotalTokens: 160_001 })] }],
    ['prefill-busy', { others: [side(1, { legs: 8 })] }],
    ['prefill-late', { others: [side(1, { tokensAhead: 60_001 })] }],
  ];
  expect(whys.map(([, part]) => lacking(60, part))).toEqual(whys.map(([why]) => [why, true]));
  // A sixteenth takes ten seconds.
  expect(whys.map(([, part]) => lacking(10, part))).toEqual(whys.map(([why]) => [why, false]));
});
