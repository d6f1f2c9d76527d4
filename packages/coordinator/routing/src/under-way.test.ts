import * as fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { commonBlocks } from './sorted-prompts.ts';
import { keysOf, naiveCommon } from './testing/chains.ts';
import { UnderWay } from './under-way.ts';

const holders = (underWay: UnderWay, keys: Int32Array, nowMs: number, least = 0): number[][] => {
  const found: number[][] = [];
  underWay.each(keys, nowMs, least, (...more) => found.push(more));
  return found;
};

describe('prompts under way', () => {
  const prompt = fc.array(fc.nat(1), { maxLength: 12 });

  it('finds how many leading blocks two prompts have in common', () => {
    fc.assert(
      fc.property(prompt, prompt, (a, b) => {
        expect(commonBlocks(keysOf(a), keysOf(b))).toBe(naiveCommon(a, b));
      }),
    );
  });

  it('names the workers that will hold more than a prefix, the most first, and from when on', () => {
    fc.assert(
      fc.property(fc.array(prompt, { maxLength: 60 }), prompt, fc.nat(4), (given, asked, least) => {
        const underWay = new UnderWay();
        for (const [worker, one] of given.entries()) underWay.given({}, keysOf(one), worker, 0, 500, 100);
        const naive = given.map((one, worker) => [worker, naiveCommon(one, asked), 400]);
        const found = holders(underWay, keysOf(asked), 1, least);
        expect(found.toSorted((a, b) => a[0]! - b[0]!)).toEqual(naive.filter(([, blocks]) => blocks! > least));
        expect(underWay.mostOf(keysOf(asked), 1)).toBe(Math.max(0, ...naive.map(([, blocks]) => blocks!)));
        expect(found.map(([, blocks]) => blocks)).toEqual(
          found.map(([, blocks]) => blocks).toSorted((a, b) => b! - a!),
        );
      }),
    );
  });

  it('forgets them when they should long be computed, with their worker, and with who wanted them', () => {
    const underWay = new UnderWay();
    underWay.given({}, keysOf([1, 2, 3]), 4, 0, 500, 100);
    underWay.given({}, keysOf([1, 2, 9, 9]), 5, 1_000, 500, 100);
    const asked = keysOf([1, 2, 3, 8]);
    expect(holders(underWay, asked, 1_999)).toEqual([
      [4, 3, 400],
      [5, 2, 1_400],
    ]);
    expect(holders(underWay, asked, 2_000)).toEqual([[5, 2, 1_400]]);
    underWay.left(5);
    expect(holders(underWay, asked, 1_999)).toEqual([[4, 3, 400]]);
    const [first, second] = [{}, {}];
    underWay.given(first, keysOf([1, 2]), 6, 1_000, 500, 100);
    underWay.given(second, keysOf([1, 2]), 6, 1_100, 500, 100);
    underWay.ended(first);
    expect(holders(underWay, asked, 1_999)).toEqual([
      [4, 3, 400],
      [6, 2, 1_500],
    ]);
    underWay.ended(second);
    underWay.ended(second);
    expect(holders(underWay, asked, 1_999)).toEqual([[4, 3, 400]]);
    expect(holders(underWay, keysOf([]), 0)).toEqual([]);
  });

  it('is bounded: who came first is forgotten, and a look ends with those that have most of the prompt', () => {
    const underWay = new UnderWay();
    for (let i = 0; i <= 512; i++) underWay.given({}, keysOf([i]), i, 0, 500, 100);
    expect([0, 1, 512].map((i) => holders(underWay, keysOf([i]), 1).length)).toEqual([0, 1, 1]);
    for (let i = 0; i < 512; i++) underWay.given({}, keysOf([7, i]), i, 0, 500, 100);
    const found = holders(underWay, keysOf([7, 300, 1]), 1);
    expect(found[0]).toEqual([300, 2, 400]);
    expect(found.length).toBeLessThanOrEqual(128);
  });
});
