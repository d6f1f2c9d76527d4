import * as fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { commonBlocks, UnderWay } from './under-way.ts';

/** A chain: hashes are equal as long as all numbers before them are. */
function keysOf(numbers: readonly number[]): Int32Array {
  const keys = new Int32Array(2 * numbers.length);
  let chain = 17;
  numbers.forEach((number, i) => {
    chain = Math.imul(chain ^ (number + 1), 0x9e3779b1) | 0;
    keys[2 * i] = chain;
    keys[2 * i + 1] = Math.imul(chain, 31);
  });
  return keys;
}

describe('prompts under way', () => {
  it('finds how many leading blocks two prompts have in common', () => {
    const numbers = fc.array(fc.nat(1), { maxLength: 12 });
    fc.assert(
      fc.property(numbers, numbers, (a, b) => {
        let naive = 0;
        while (naive < Math.min(a.length, b.length) && a[naive] === b[naive]) naive++;
        for (let least = 0; least <= naive; least++) expect(commonBlocks(keysOf(a), keysOf(b), least)).toBe(naive);
      }),
    );
  });

  const nothing = new Array<number>(600).fill(0);
  const holders = (underWay: UnderWay, keys: Int32Array, nowMs: number, held = nothing): [number, number][] => {
    const found: [number, number][] = [];
    underWay.each(
      keys,
      nowMs,
      (worker) => held[worker],
      (worker, blocks) => found.push([worker, blocks]),
    );
    return found;
  };

  it('names the workers that will hold a prefix, until it should long be computed', () => {
    const underWay = new UnderWay();
    underWay.given(keysOf([1, 2, 3]), 4, 0, 500);
    underWay.given(keysOf([1, 2, 9, 9]), 5, 1_000, 500);
    underWay.given(keysOf([7]), 6, 0, 500);
    const asked = keysOf([1, 2, 3, 8]);
    expect(holders(underWay, asked, 1_999)).toEqual([
      [4, 3],
      [5, 2],
    ]);
    // Workers that hold as much already, or may not have it, are left out.
    expect(holders(underWay, asked, 1_999, [0, 0, 0, 0, 2, 2])).toEqual([[4, 3]]);
    expect(holders(underWay, asked, 1_999, [0, 0, 0, 0, 3])).toEqual([]);
    expect(holders(underWay, asked, 2_000)).toEqual([[5, 2]]);
    expect(holders(underWay, asked, 3_000)).toEqual([]);
    expect(holders(underWay, keysOf([]), 0)).toEqual([]);
  });

  it('is bounded: who came first is forgotten', () => {
    const underWay = new UnderWay();
    for (let i = 0; i <= 512; i++) underWay.given(keysOf([i]), i, 0, 500);
    expect(holders(underWay, keysOf([0]), 1)).toEqual([]);
    expect(holders(underWay, keysOf([1]), 1)).toEqual([[1, 1]]);
    expect(holders(underWay, keysOf([512]), 1)).toEqual([[512, 1]]);
  });
});
