/** Nodes beside engines that name blocks otherwise than we do: what of theirs a prompt finds, whatever they tell in which order. */
import * as fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import {
  bare,
  blockTokens,
  described,
  first,
  length,
  promptOf,
  removed,
  foreignRig as rig,
  second,
} from '../testing/foreign-nodes.ts';
import { mediumNumbers } from './media.ts';
import { NamesBudget } from './names-budget.ts';
import { WaitingRuns } from './waiting-runs.ts';

const prompts = [1, 2].map((seed) => promptOf(seed));
const [prompt, other] = prompts as [ReturnType<typeof promptOf>, ReturnType<typeof promptOf>];

describe('what a node beside an engine of other names holds', () => {
  it('is found by a prompt where its tokens are told, in memory, on disk and in shared tiers', () => {
    const { say, held, told, lies, listing } = rig();
    say([described(prompt, 0, 4), described(prompt, 4, 6), bare(prompt, 2, 7), described(prompt, 7, 8, 'REDIS')]);
    // The seventh block was told of as a hash, before anybody knew its tokens; and so the eighth follows one without a name.
    expect([held(prompt), held(other), told.unnamed]).toEqual([6, 0, 2]);
    say([described(prompt, 6, 7)]);
    expect(held(prompt)).toBe(8);
    say([removed(prompt, 0, 6)]);
    expect(held(prompt)).toBe(0);
    say([described(prompt, 0, 2)]);
    expect(held(prompt)).toBe(8); // the rest is on disk
    expect([Object.values(lies).every((count) => count === 0), listing.problem]).toEqual([true, undefined]);
  });

  it('whose tokens nobody knows is credited with nothing, counted, and it says why', () => {
    const { say, held, told, listing, index } = rig();
    say([bare(prompt, 0, 8, 'CPU'), bare(other)]);
    expect([held(prompt), told.unnamed, listing.namespaces, index.stats().blocks]).toEqual([0, 16, [], 0]);
    expect(listing.problem?.what).toBe('none of its blocks can be named, as it tells no tokens of them');
    say([described(other, 0, 3)]);
    expect([held(other), listing.problem]).toEqual([3, undefined]);
  });

  it('and starts again is credited with what its disk still has, by the names of before', () => {
    const { say, begins, held, told } = rig();
    say([described(prompt), bare(prompt, 0, 5)]);
    begins('restarted');
    expect(held(prompt)).toBe(0);
    begins();
    say([bare(prompt, 0, 5)]);
    expect([held(prompt), told.unnamed]).toEqual([5, 0]);
    say([removed(prompt, 3, 5, 'DISK')]);
    expect(held(prompt)).toBe(3);
  });

  it('and tells tier by tier is credited with all, whatever comes before what it follows', () => {
    const { say, begins, held } = rig();
    begins();
    say([described(prompt, 5, 8), described(prompt, 2, 5)]);
    expect(held(prompt)).toBe(0);
    say([removed(prompt, 6, 7)]);
    say([described(prompt, 0, 2, 'DISK')]);
    expect(held(prompt)).toBe(6);
    say([described(prompt, 6, 7, 'DISK'), described(other, 3, 8)]);
    expect([held(prompt), held(other)]).toEqual([8, 0]);
    say([{ type: 'AllBlocksCleared', medium: 'CPU' }]);
    say([described(other, 0, 3)]);
    expect([held(prompt), held(other)]).toEqual([2, 3]);
  });

  it('for several ranks is at hand where each has its part; groups with a window, and engines of before, do not count', () => {
    const { say, held, listing } = rig();
    for (const namespace of [first, second]) say([described(prompt)], namespace);
    say([bare(prompt, 6, 8, 'CPU')], '0000000000000003');
    expect([held(prompt), listing.namespaces]).toEqual([8, [first, second]]);
    say([removed(prompt, 4, 8)], second);
    expect(held(prompt)).toBe(4);
    say([described(other)], first, 100);
    expect([held(prompt), listing.namespaces]).toEqual([8, [first]]);
    // What is written down meanwhile is no sign of life.
    say([described(other, 0, 8, 'DISK')], second, 101);
    expect(listing.namespaces).toEqual([first]);
    say([described(other)], second, 101);
    expect([held(prompt), held(other)]).toEqual([4, 8]);
  });

  it('has names while there is room for them; those of no use make room, and all is given back in the end', () => {
    const { say, begins, held, told, lies, lines, budget, listing } = rig({ maxBlocks: 20 });
    const many = Array.from({ length: 5 }, (_, i) => promptOf(10 + i));
    for (const one of many) say([described(one)]);
    expect(many.map(held)).toEqual([8, 8, 0, 0, 0]);
    expect([told.leftOut, lies.no_room, budget.bytes > 0]).toEqual([24, 3, true]);
    expect(lines).toEqual([
      "KV events of cache node n: no room to name them, 16 blocks have one; raise the coordinator's index.maxBytes; ignored",
    ]);
    say([removed(many[0]!), described(many[4]!)]);
    expect(many.map(held)).toEqual([0, 8, 0, 0, 8]);
    begins();
    say([described(many[2]!), described(many[3]!)]);
    expect(many.map(held)).toEqual([0, 0, 8, 8, 0]);
    listing.forget();
    expect([many.map(held), budget.bytes]).toEqual([[0, 0, 0, 0, 0], 0]);
  });

  it('cannot make what waits for its parent take more than its room', () => {
    const { say, held, budget } = rig({ namesBytes: 1 << 18 });
    for (let i = 0; i < 2_000; i++) say([described(promptOf(100 + i), 4, 8)]);
    expect(budget.bytes).toBeLessThanOrEqual(1 << 18);
    say([{ type: 'AllBlocksCleared', medium: 'CPU' }]);
    expect(budget.bytes).toBe(0);
    say([described(prompt)]);
    expect(held(prompt)).toBe(8);
  });
});

it('of blocks that wait for the one before them, the oldest go first', () => {
  const budget = new NamesBudget(16 * 3_000);
  const waiting = new WaitingRuns<string>(budget);
  const place = { namespace: first, medium: mediumNumbers.cpu, owner: 'n', atS: 1 };
  const runs = [1, 2, 3].map((seed) => promptOf(seed).keys);
  const words = new Int32Array(4 * blockTokens);
  for (const keys of runs)
    expect(waiting.hold({ ...place, keys: keys.subarray(2, 10), tokens: words, parent: keys.subarray(0, 2) })).toBe(
      true,
    );
  expect(runs.map((keys) => waiting.followersOf(keys, 0).length)).toEqual([0, 1, 1]);
  const tooMany = promptOf(4, 20).keys;
  expect(waiting.hold({ ...place, keys: tooMany, tokens: words, parent: undefined })).toBe(false);
  waiting.clear('n');
  expect([waiting.isEmpty, budget.bytes]).toEqual([true, 0]);
});

const step = fc.record({
  kind: fc.constantFrom('store', 'store', 'bare', 'remove', 'clear', 'snapshot', 'restart'),
  ...{ node: fc.nat(1), chain: fc.nat(1), from: fc.nat(length - 1), blocks: fc.integer({ min: 1, max: length }) },
  ...{ medium: fc.constantFrom('CPU', 'DISK'), namespace: fc.constantFrom(first, second) },
  order: fc.array(fc.nat(1_000), { minLength: 64, maxLength: 64 }),
});

it('never more than it holds, and after a snapshot with tokens, in whatever order, all that each rank does', () => {
  fc.assert(
    fc.property(fc.array(step, { minLength: 1, maxLength: 30 }), (steps) => {
      const { index, all, budget } = rig({ nodes: 2 });
      /** By node, namespace and medium: which blocks of which prompt. */
      const truth = all.map(() => new Map<string, Set<number>>());
      const at = (node: number, namespace: string, medium: string): Set<number> => {
        const key = `${namespace}/${medium}`;
        const those = truth[node]!.get(key) ?? new Set();
        truth[node]!.set(key, those);
        return those;
      };
      const most = (node: number, chain: number): number => {
        const { namespaces } = all[node]!.listing;
        const needed = namespaces.map((namespace) => {
          let count = 0;
          const has = (block: number): boolean =>
            ['CPU', 'DISK'].some((medium) => at(node, namespace, medium).has(length * chain + block));
          while (count < length && has(count)) count++;
          return count;
        });
        return Math.min(...needed, needed.length === 0 ? 0 : length);
      };
      for (const { kind, node, chain, from, blocks, medium, namespace, order } of steps) {
        const { say, begins, held } = all[node]!;
        const to = Math.min(length, from + blocks);
        const those = at(node, namespace, medium);
        const named = Array.from({ length: to - from }, (_, i) => length * chain + from + i);
        if (kind === 'store' || kind === 'bare') {
          say([(kind === 'store' ? described : bare)(prompts[chain]!, from, to, medium)], namespace);
          for (const block of named) those.add(block);
        } else if (kind === 'remove') {
          say([removed(prompts[chain]!, from, to, medium)], namespace);
          for (const block of named) those.delete(block);
        } else if (kind === 'clear') {
          say([{ type: 'AllBlocksCleared', medium }], namespace);
          those.clear();
        } else {
          begins(kind === 'restart' ? 'restarted' : 'snapshot');
          const told = [...truth[node]!].flatMap(([key, blocks]) => [...blocks].map((block) => [key, block] as const));
          const mixed = told.map((one, i) => [order[i % 64]!, one] as const).sort(([a], [b]) => a - b);
          for (const [, [key, block]] of mixed) {
            const [where, what] = key.split('/') as [string, string];
            const place = block % length;
            say([described(prompts[Math.floor(block / length)]!, place, place + 1, what)], where);
          }
          for (const number of [0, 1]) expect(held(prompts[number]!)).toBe(most(node, number));
        }
        for (const [i, { held }] of all.entries())
          for (const number of [0, 1]) expect(held(prompts[number]!)).toBeLessThanOrEqual(most(i, number));
        index.checkIntegrity();
      }
      // All that is described by one of the two is credited to whoever holds it, when both have told all.
      for (const chain of [0, 1]) for (const where of [first, second]) all[0]!.say([described(prompts[chain]!)], where);
      for (const chain of [0, 1]) expect(all[1]!.held(prompts[chain]!)).toBe(most(1, chain));
      for (const { listing } of all) listing.forget();
      expect(budget.bytes).toBe(0);
    }),
    { numRuns: 150 },
  );
});
