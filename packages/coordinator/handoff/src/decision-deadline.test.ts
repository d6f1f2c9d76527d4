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
      for (const mode of ['predicted', 'always'] as const) expect(of(mode, a)?.arrivedS ?? 0).toBeLessThanOrEqual(a);
      const [less, more] = [Math.min(a, b), Math.max(a, b)].map((deadlineS) => of('always', deadlineS)?.blocks ?? 0);
      expect(less).toBeLessThanOrEqual(more!);
    }),
  );
});

it.each<[string, Partial<Question>]>([
  [
    'as many run as may, and the prompt has room',
    {
      decode: running(64, { maxRunning: 64, waiting: 60, awaiting: 60, usedBlocks: 24_000, freedBlocksPerS: 600 }),
      others: [side(1, { tokensAhead: 80_000 })],
    },
  ],
  [
    'there is no room for the longest answer',
    {
      ...{ maxTokens: 32_000, others: [side(1, { tokensAhead: 80_000 })] },
      decode: running(9, { totalBlocks: 10_000, usedBlocks: 9_000, freedBlocksPerS: 50 }),
    },
  ],
  [
    'what is to travel before waits for room as well',
    {
      ...{ tokens: 6_401, linkBlocksPerS: 100, pendingBlocks: 9_000 },
      decode: running(9, { waiting: 1, awaiting: 1, usedBlocks: 96_300, waitingBlocks: 9_000, freedBlocksPerS: 100 }),
    },
  ],
  [
    'what is computed before waits for room as well',
    {
      ...{ tokens: 6_401, others: [side(1, { tokensAhead: 72_000, legs: 1 })] },
      decode: running(9, { waiting: 1, awaiting: 1, usedBlocks: 96_300, waitingBlocks: 9_000, freedBlocksPerS: 100 }),
    },
  ],
])('that the decode side is full is no time won: %s', (_, part) => {
  for (const mode of ['predicted', 'always'] as const)
    expect(decide(question({ tokens: 15_001, mode, ...part }))).toMatchObject({
      ...{ reason: 'prefill-late', split: undefined },
    });
});

it('always: a part only where it is no worse than the decode side alone', () => {
  // P would be there with one part in 16 after 59.5 s; D is, with all, after 16.
  const of = (tokensAhead: number, part: Partial<Question> = {}) =>
    decide(question({ mode: 'always', tokens: 16_001, others: [side(1, { tokensAhead })], ...part }));
  expect(of(58_500)).toMatchObject({ reason: 'alone', split: undefined, isLacking: false });
  // D has as much to do before as P.
  const busy = { decode: side(0, { tokensAhead: 44_100, waiting: 1 }) };
  expect([of(44_000, busy).split?.blocks, of(44_000, { ...busy, deadlineS: 53 }).split?.blocks]).toEqual([938, 500]);
  // All of it is taken where that is in time, however late.
  expect(of(43_000)).toMatchObject({ reason: 'always', split: { blocks: 1_000 } });
  // The decode side alone is in time, and no part is; where neither is, a part that takes a twentieth longer is as good.
  const short = { tokens: 2_901, deadlineS: 2, ttftS: 3 };
  expect(of(1_700, short)).toMatchObject({ reason: 'alone', expected: { plainS: expect.closeTo(2.911, 9) } });
  const alike = { ...short, deadlineS: 1 };
  const reasons = [2.91, 2.92, 2.95].map((ttftS) => of(0, { ...alike, ttftS }).reason);
  expect(reasons).toEqual(['always', 'alone', 'always']);
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
