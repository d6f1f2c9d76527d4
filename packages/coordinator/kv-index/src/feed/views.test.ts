/** What counts for a worker whose groups have windows. */
import { describe, expect, it, vi } from 'vitest';
import { KvIndex } from '../kv-index.ts';
import { type GroupView, matchView, mostLooks, WindowLooks } from './views.ts';

const keys = Int32Array.from({ length: 2 * 900 }, (_, i) => Math.imul(i + 7, 0x9e3779b1) | 0);
const prompt = (blocks: number): Int32Array => keys.subarray(0, 2 * blocks);

/** Groups that hold the blocks of these ranges. */
function rig(...held: readonly (readonly [windowBlocks: number | undefined, ...ranges: [number, number][]])[]) {
  const index = new KvIndex({ maxBytes: 1 << 24 });
  const groups = held.map(([windowBlocks, ...ranges]): GroupView => {
    const source = index.addSource();
    for (const [from, to] of ranges) index.stored(source, 0, keys.slice(2 * from, 2 * to), 'unknown');
    return { sources: [source], windowBlocks };
  });
  const looks = vi.spyOn(index, 'isHeld');
  return { match: (blocks: number) => matchView(index, prompt(blocks), [groups]).blocks, looks };
}

it.each([600, 700, 856, 857, 900])('with windows alone, a tail of any length is computed anew: %i blocks', (blocks) => {
  const { match } = rig([8, [0, 600]]);
  expect(match(blocks)).toBe(600);
});

it('a prefix whose windows are whole is found behind a long one whose are not, at a look-up or two for each block', () => {
  const { match, looks } = rig([undefined, [0, 900]], [8, [0, 900]], [64, [0, 400]]);
  expect(match(900)).toBe(400);
  expect(looks.mock.calls.length).toBeLessThan(2 * 900);
});

it('where hardly any window is whole, an end is found behind hundreds of others', () => {
  const ranges = Array.from({ length: 450 }, (_, i): [number, number] => [2 * i, 2 * i + 1]);
  const { match } = rig([2, [0, 100], ...ranges.slice(51)]);
  expect([match(600), match(900)]).toEqual([100, 100]);
});

describe('of a hundred workers with windows', () => {
  const count = 8_192;
  const long = Int32Array.from({ length: 2 * count }, (_, i) => Math.imul(i + 7, 0x9e3779b1) | 0);
  const cluster = (held: number) => {
    const index = new KvIndex({ maxBytes: 1 << 24 });
    const other = index.addSource();
    index.stored(other, 0, long.slice(0, 2 * held), 'root');
    const views = Array.from({ length: 100 }, () => [[{ sources: [index.addSource()], windowBlocks: 64 }]]);
    const last = views.at(-1)![0]![0]!.sources[0]!;
    const looks = vi.spyOn(index, 'isHeld');
    const ends = vi.spyOn(index, 'endOfHeld');
    const match = (): number[] => {
      const shared = new WindowLooks(index, long, views.length);
      return views.map((view) => matchView(index, long, view, shared).blocks);
    };
    return { index, last, looks, ends, match };
  };
  const nothing = Array<number>(100).fill(0);

  it('a prompt that nobody has computed is looked through once', () => {
    const { match, looks, ends } = cluster(0);
    expect([match(), looks.mock.calls.length, ends.mock.calls.length]).toEqual([nothing, 0, 1]);
  });

  it('one that another has computed takes a bounded number of look-ups, and who has its end counts', () => {
    const { index, last, match, looks } = cluster(count);
    expect(match()).toEqual(nothing);
    expect(looks.mock.calls.length).toBeLessThanOrEqual(mostLooks);
    index.stored(last, 0, long.slice(2 * (count - 64)), 'unknown');
    expect(match()).toEqual([...nothing.slice(1), count]);
  });

  it('of a thousand of them, who is asked last is judged like the others', () => {
    const index = new KvIndex({ maxBytes: 1 << 26 });
    const views = Array.from({ length: 1_000 }, () => [[{ sources: [index.addSource()], windowBlocks: 64 }]]);
    const sources = views.map((view) => view[0]![0]!.sources[0]!);
    index.stored(sources[0]!, 0, long, 'root');
    for (const source of sources.slice(1, -1)) index.stored(source, 0, long.slice(2 * (count - 64)), 'unknown');
    index.stored(sources.at(-1)!, 0, long.slice(2 * (count - 66), 2 * (count - 2)), 'unknown');
    const shared = new WindowLooks(index, long, views.length);
    const found = views.map((view) => matchView(index, long, view, shared).blocks);
    expect(found).toEqual([...Array<number>(999).fill(count), count - 2]);
  });

  it('what those who have it do not use is for those after them', () => {
    const { index, last, match } = cluster(count);
    for (let source = 1; source < last; source++) index.stored(source, 0, long.slice(2 * (count - 64)), 'unknown');
    index.stored(last, 0, long.slice(0, 2 * 1_000), 'unknown');
    expect(match()).toEqual([...Array<number>(99).fill(count), 1_000]);
  });
});
