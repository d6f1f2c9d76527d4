import { expect, it } from 'vitest';
import { attentionSpecs, longestSequence, mostBlocks } from './attention-groups.ts';

const layout = { layers: 1, kvHeads: 1, headDim: 1, dtype: 'f32', blockTokens: 4, blockBytes: 64, order: '' } as const;
const hybrid = {
  ...layout,
  groups: [
    { windowTokens: 0, layers: [2] },
    { windowTokens: 20, layers: [0] },
    { windowTokens: 20, layers: [1] },
  ],
};
const longest = (kv: Parameters<typeof attentionSpecs>[0], blockCount: number, maxStepTokens = 8): number => {
  const model = { maxModelTokens: 1_000 } as Parameters<typeof longestSequence>[1]['model'];
  return longestSequence(attentionSpecs(kv), { model, blockCount, kv }, maxStepTokens);
};

it('full attention takes a block for each four tokens', () => {
  expect(attentionSpecs(layout)).toEqual([{ kind: 'full_attention', blockTokens: 4 }]);
  expect(longest(layout, 11)).toBe(40);
  expect(longest(layout, 1_000)).toBe(1_000);
});

it('a window takes a bounded number of blocks', () => {
  // 19 tokens before and 8 of a step: 7 blocks, and one more where the window begins inside a block.
  expect(longest(hybrid, 1 + 3 * 8)).toBe(32);
  expect(longest(hybrid, 1 + 3 * 8 + 10)).toBe(72);
  expect(longest(hybrid, 3)).toBe(0);
  expect([4, 32, 33, 4_000].map(mostBlocks(attentionSpecs(hybrid), 4, 8))).toEqual([3, 24, 25, 1_016]);
  expect(longest({ ...layout, groups: [{ windowTokens: 20, layers: [0] }] }, 1 + 8)).toBe(1_000);
});
