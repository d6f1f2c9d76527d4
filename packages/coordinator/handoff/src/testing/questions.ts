/** Questions that are decided: one by hand, parts of it otherwise, and any. */
import { maxMedia } from '@kvtier/kv-index';
import fc from 'fast-check';
import type { Question, Side } from '../question.ts';

export const matchOf = (blocks: number) => {
  const byMedium = new Int32Array(maxMedia);
  byMedium[0] = blocks;
  return { blocks, byMedium };
};

export const side = (number: number, part: Partial<Side> & { held?: number } = {}): Side => {
  const { held = 0, ...more } = part;
  return {
    ...{ number, name: `w${number}`, role: 'both', isReady: true, revision: '', identity: 'same', node: `n${number}` },
    ...{
      legs: 0,
      awaiting: 0,
      maxStepTokens: 500,
      maxTotalTokens: undefined,
      prefillStepS: 0,
      pacingTrust: 0.9,
      waiting: 0,
      running: 0,
      tokensAhead: 0,
      usedBlocks: 0,
      totalBlocks: 100_000,
      waitingBlocks: 0,
    },
    ...{ freedBlocksPerS: 0, maxRunning: undefined, loadAheadS: 0, prefillTokensPerS: 1_000, stepS: 0.01 },
    ...{
      stepPerRequestS: 0.001,
      loadBlocksPerS: [0, 0, 0, 1_000],
      match: matchOf(held),
      remoteBlocks: 0,
      remoteMedium: 0,
    },
    ...more,
  };
};

export const lateBy = (alone: number, split: number, pause = 0) => ({
  aloneS: () => alone,
  splitS: () => split,
  pauseS: () => pause,
});

export const question = (part: Partial<Question> = {}): Question => ({
  ...{ mode: 'predicted', tokens: 1_601, blockTokens: 16, maxTokens: 100, decode: side(0), others: [side(1)] },
  ...{ waitedS: 0, ttftS: 2, itlS: 0.05, linkBlocksPerS: 1_000, pendingBlocks: 0, deadlineS: 60 },
  ...{ legsPerWorker: 8, legsLeft: 100, late: lateBy(0, 0.004) },
  ...part,
});

const rate = fc.double({ min: 50, max: 100_000, noNaN: true });
export const sideFigures = fc.record({
  held: fc.integer({ min: 0, max: 80 }),
  role: fc.constantFrom('prefill' as const, 'decode' as const, 'both' as const),
  isReady: fc.boolean(),
  revision: fc.constantFrom('', 'v2'),
  identity: fc.constantFrom('same', 'same', 'other'),
  node: fc.constantFrom('a', 'b', null),
  legs: fc.integer({ min: 0, max: 9 }),
  awaiting: fc.integer({ min: 0, max: 20 }),
  maxStepTokens: fc.constantFrom(16, 512, 2_048),
  maxTotalTokens: fc.constantFrom(undefined, undefined, 800, 10_000),
  prefillStepS: fc.constantFrom(0, 0.001, 0.01),
  pacingTrust: fc.constantFrom(0.5, 0.9),
  waiting: fc.integer({ min: 0, max: 20 }),
  running: fc.integer({ min: 0, max: 50 }),
  tokensAhead: fc.integer({ min: 0, max: 50_000 }),
  usedBlocks: fc.integer({ min: 0, max: 1_000 }),
  totalBlocks: fc.integer({ min: 0, max: 1_000 }),
  waitingBlocks: fc.integer({ min: 0, max: 1_000 }),
  freedBlocksPerS: fc.integer({ min: 0, max: 100 }),
  maxRunning: fc.option(fc.integer({ min: 1, max: 64 }), { nil: undefined }),
  loadAheadS: fc.double({ min: 0, max: 3, noNaN: true }),
  prefillTokensPerS: rate,
  stepS: fc.double({ min: 0, max: 0.1, noNaN: true }),
  stepPerRequestS: fc.double({ min: 0, max: 0.01, noNaN: true }),
  loadBlocksPerS: fc.array(fc.integer({ min: 0, max: 5_000 }), { minLength: 6, maxLength: 6 }),
  remoteBlocks: fc.integer({ min: 0, max: 50 }),
  remoteMedium: fc.integer({ min: 1, max: 5 }),
});
export const questions = fc
  .record({
    mode: fc.constantFrom('predicted' as const, 'always' as const, 'never' as const),
    tokens: fc.integer({ min: 1, max: 1_500 }),
    maxTokens: fc.integer({ min: 1, max: 500 }),
    decode: sideFigures,
    others: fc.array(sideFigures, { maxLength: 5 }),
    waitedS: fc.double({ min: 0, max: 3, noNaN: true }),
    ttftS: fc.double({ min: 0.01, max: 10, noNaN: true }),
    itlS: fc.double({ min: 0.001, max: 1, noNaN: true }),
    linkBlocksPerS: fc.integer({ min: 0, max: 10_000 }),
    pendingBlocks: fc.integer({ min: 0, max: 10_000 }),
    legsLeft: fc.integer({ min: 0, max: 3 }),
  })
  .map(({ decode, others, ...more }) =>
    question({
      ...more,
      decode: side(0, { ...decode, isReady: true }),
      others: others.map((one, i) => side(i + 1, one)),
    }),
  );
