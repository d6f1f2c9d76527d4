/** Which prefixes several attention groups can bring: the arithmetic against its definition, block by block. */

import type { Hit } from '@kvtier/load-planner';
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { columnsWithin, commonPrefixes, groupWindows, partsOf } from './groups.ts';

const full = Number.POSITIVE_INFINITY;
const layout = { layers: 1, kvHeads: 1, headDim: 1, dtype: 'f32', blockTokens: 16, blockBytes: 64, order: '' } as const;

/** "aaa.dd": arena, arena, arena, gap, disk, disk. */
const hitOf = (text: string, estimatedUs = 0): Hit => {
  const spans: { tier: string; count: number }[] = [];
  for (const letter of text) {
    const tier = { a: 'arena', d: 'disk' }[letter] ?? '';
    const last = spans.at(-1);
    if (last?.tier === tier) last.count++;
    else spans.push({ tier, count: 1 });
  }
  return { spans, estimatedUs };
};

describe('windows', () => {
  it('are counted in blocks before the end of a prefix', () => {
    expect(groupWindows(layout)).toEqual([full]);
    const of = (windowTokens: number) => ({ windowTokens, layers: [0] });
    // A token sees itself: a window of 17 looks at 16 tokens before it.
    expect(groupWindows({ ...layout, groups: [of(0), of(1), of(2), of(17), of(18)] })).toEqual([full, 0, 1, 1, 2]);
  });
});

describe('prefixes', () => {
  it('need all of full attention and the last blocks of a window', () => {
    const choices = commonPrefixes([hitOf('aaaaaaa'), hitOf('..aa.aaa')], [full, 2], 0);
    expect(choices).toEqual([
      { blocks: 4, copies: 6, bringUs: 0 },
      { blocks: 7, copies: 9, bringUs: 0 },
    ]);
  });

  it('beyond what the engine holds itself need less of the window', () => {
    const choices = commonPrefixes([hitOf('aaaaaaa'), hitOf('...aa.a')], [full, 3], 3);
    expect(choices.map(({ blocks }) => blocks)).toEqual([1, 2]);
  });

  it('take the time of the blocks that come from below', () => {
    const [choice] = commonPrefixes([hitOf('aadd', 200), hitOf('..dd', 50)], [full, 2], 0).slice(-1);
    expect(choice).toEqual({ blocks: 4, copies: 6, bringUs: 250 });
  });

  it('property: are those whose every block that is looked at is held', () => {
    const text = fc.array(fc.constantFrom('a', 'a', 'd', '.'), { maxLength: 12 }).map((letters) => letters.join(''));
    const prefix = fc.array(fc.constantFrom('a', 'd'), { maxLength: 12 }).map((letters) => letters.join(''));
    const groups = fc.array(fc.tuple(fc.integer({ min: 0, max: 5 }), text), { minLength: 1, maxLength: 3 });
    fc.assert(
      fc.property(fc.option(prefix), groups, fc.nat({ max: 6 }), (whole, some, from) => {
        const texts = [...(whole === null ? [] : [whole]), ...some.map(([, held]) => held)];
        const windows = [...(whole === null ? [] : [full]), ...some.map(([window]) => window)];
        const hits = texts.map((one) => hitOf(one, 100));
        const expected: number[] = [];
        for (let end = from + 1; end <= Math.min(...texts.map((one) => one.length)); end++) {
          const seen = (group: number) => texts[group]!.slice(Math.max(from, end - windows[group]!), end);
          if (texts.every((_, group) => !seen(group).includes('.'))) expected.push(end - from);
        }
        expect(commonPrefixes(hits, windows, from).map(({ blocks }) => blocks)).toEqual(expected);
      }),
      { numRuns: 500 },
    );
  });
});

describe('rows of block ids', () => {
  const rows = Int32Array.of(5, 6, 7, 8, 0, 0, 9, 10, 0, 0, 0, 0);

  it('are cut into what each group moves', () => {
    expect(partsOf(rows, 3)).toEqual([
      { group: 0, from: 0, blockIds: Int32Array.of(5, 6, 7, 8) },
      { group: 1, from: 2, blockIds: Int32Array.of(9, 10) },
    ]);
    expect(partsOf(rows, 3, 2)).toEqual([{ group: 0, from: 0, blockIds: Int32Array.of(5, 6) }]);
    expect(() => partsOf(Int32Array.of(1, 0, 2), 1)).toThrow('null block behind');
  });

  it('fit into a room by columns', () => {
    expect([0, 1, 2, 3, 4, 5, 6].map((room) => columnsWithin(rows, 3, room))).toEqual([0, 1, 2, 2, 3, 3, 4]);
  });
});
