import { expect, it } from 'vitest';
import { attentionGroups, blockLayers, kvBlockBytes } from './attention-groups.ts';

const pattern = (layers: number, every: number) =>
  Array.from({ length: layers }, (_, layer) => ((layer + 1) % every === 0 ? 0 : 512));

it('leaves a model of one kind of layer in one group', () => {
  expect(attentionGroups([0, 0, 0])).toEqual([{ windowTokens: 0, layers: [0, 1, 2] }]);
  expect(attentionGroups([64, 64])).toEqual([{ windowTokens: 64, layers: [0, 1] }]);
});

it('makes groups as large as the rarest kind, those that see everything first', () => {
  expect(attentionGroups(pattern(6, 3))).toEqual([
    { windowTokens: 0, layers: [2, 5] },
    { windowTokens: 512, layers: [0, 3] },
    { windowTokens: 512, layers: [1, 4] },
  ]);
});

it('pads the last groups of Gemma 3 (26 layers, five to one)', () => {
  const groups = attentionGroups(pattern(26, 6));
  expect(groups.map(({ windowTokens, layers }) => [windowTokens, layers.length])).toEqual([
    [0, 4],
    [512, 4],
    [512, 4],
    [512, 4],
    [512, 4],
    [512, 3],
    [512, 3],
  ]);
  expect(groups.flatMap(({ layers }) => layers).sort((a, b) => a - b)).toEqual([...Array(26).keys()]);
  expect(blockLayers(groups)).toBe(4);
});

it('takes one group per kind when they are nearly equal in number', () => {
  const windows = [0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 64];
  const groups = attentionGroups(windows);
  expect(groups.map(({ layers }) => layers.length)).toEqual([5, 6]);
  expect(kvBlockBytes({ windows, kvHeads: 2, headDim: 8 }, 16)).toBe(6 * 2 * 2 * 8 * 16 * 4);
});
