/** Rates of shared prefixes, against counting each prefix by itself. */
import { expect, it } from 'vitest';
import { PrefixCounts } from './prefix-counts.ts';

const keysOf = (blocks: readonly number[]): Int32Array =>
  Int32Array.from(blocks.flatMap((_, at) => [hash(blocks.slice(0, at + 1)), at]));
/** As a chain hash: of the block and all before it. */
const hash = (blocks: readonly number[]): number => blocks.reduce((sum, block) => (Math.imul(sum, 31) + block) | 0, 7);
const asked = (blocks: readonly number[]) => ({
  ...{ keys: keysOf(blocks), tokens: blocks.length * 16 + 5, blockTokens: 16, maxTokens: 10 },
});

/** Draws from a seed. */
function drawn(seed: number): () => number {
  let state = seed;
  return () => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    return state / 2 ** 32;
  };
}

it.each([1, 2, 3])('counts each shared prefix as a count of its own would (seed %i)', (seed) => {
  const random = drawn(seed);
  const counts = new PrefixCounts<never>({ maxNodes: 10_000, maxBlocks: 100_000 });
  const prompts: number[][] = [];
  for (let i = 0; i < 300; i++) {
    const before = prompts[Math.floor(random() * prompts.length)] ?? [];
    const shared = before.slice(0, Math.floor(random() * (before.length + 1)));
    prompts.push([...shared, ...Array.from({ length: 1 + Math.floor(random() * 6) }, () => Math.floor(random() * 3))]);
  }
  for (const prompt of prompts) counts.came(asked(prompt), 1_000, () => {});
  const naive = new Map<string, number>();
  for (const prompt of prompts)
    for (let end = 1; end <= prompt.length; end++) {
      const prefix = prompt.slice(0, end).join(' ');
      naive.set(prefix, (naive.get(prefix) ?? 0) + 1);
    }
  // Where prompts part or end, the tree has a node; its count is that of the prefix. Of each count, so many of that length.
  const expected = new Map<string, number>();
  for (const [prefix, count] of naive) {
    const longer = [...naive].some(([other, its]) => its === count && other.startsWith(`${prefix} `));
    if (longer || count < 2) continue;
    const key = `${prefix.split(' ').length} ${count}`;
    expected.set(key, (expected.get(key) ?? 0) + 1);
  }
  const found = new Map<string, number>();
  for (const { prefix } of counts.all(1_000, 2)) {
    const key = `${prefix.blocks} ${prefix.arrivals}`;
    found.set(key, (found.get(key) ?? 0) + 1);
  }
  expect(new Map([...found].sort())).toEqual(new Map([...expected].sort()));
});

it('expects as many as come, more where they grow, and fewer when they stop', () => {
  const counts = new PrefixCounts<never>({ maxNodes: 100, maxBlocks: 1_000 });
  const perS = (nowMs: number): number => [...counts.all(nowMs, 2)].find(({ prefix }) => prefix.blocks === 3)!.perS;
  let nowMs = 0;
  for (; nowMs < 120_000; nowMs += 200) counts.came(asked([1, 2, 3, nowMs]), nowMs, () => {});
  expect(perS(nowMs)).toBeGreaterThan(4.5);
  expect(perS(nowMs)).toBeLessThan(5.6);
  for (const endMs = nowMs + 2_000; nowMs < endMs; nowMs += 50) counts.came(asked([1, 2, 3, nowMs]), nowMs, () => {});
  expect(perS(nowMs)).toBeGreaterThan(20);
  expect(perS(nowMs + 120_000)).toBeLessThan(0.3);
});

it('says what is behind a prefix, and tells of those that an earlier prompt had', () => {
  const counts = new PrefixCounts<string>({ maxNodes: 100, maxBlocks: 1_000 });
  const told: number[][] = [];
  for (const tail of [[4], [5, 6], [5, 6, 7]]) {
    const seen: number[] = [];
    counts.came(asked([1, 2, 3, ...tail]), 0, ({ blocks }) => seen.push(blocks));
    told.push(seen);
  }
  expect(told).toEqual([[], [3], [3, 5]]);
  const [first] = [...counts.all(0, 3)];
  expect(first!.prefix).toMatchObject({ blocks: 3, arrivals: 3, answerTokens: 10 });
  expect(first!.prefix.tailTokens).toBeCloseTo(21 + 0.2 * (37 - 21) + 0.2 * (53 - 24.2), 6);
});

it('stays within its bounds, and keeps what is asked for most', () => {
  const counts = new PrefixCounts<number>({ maxNodes: 64, maxBlocks: 512 });
  const hot = [1, 2, 3, 4];
  for (let i = 0; i < 2_000; i++) {
    counts.came(asked(i % 4 === 0 ? [...hot, i] : [10_000 + i, 1, 2, 3, 4, 5, 6, 7, 8]), i * 10, (prefix) => {
      prefix.kept = i;
    });
    expect(counts.nodes).toBeLessThanOrEqual(64);
    expect(counts.blocks).toBeLessThanOrEqual(512);
  }
  expect([...counts.all(20_000, 100)].map(({ prefix }) => prefix.blocks)).toEqual([4]);
});
