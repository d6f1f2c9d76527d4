/** What followers are told of packs is what counts as held, also while a server comes and goes, block by block and at any moment. */
import type { HashKey, Namespace } from '@kvtier/identity';
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { slicing } from '../kit/slices.ts';
import { hashNamed, namespaceNamed } from '../kit/testing/objects.ts';
import { watchTurns } from '../kit/testing/turns.ts';
import type { Following, TierChange } from '../kit/tier.ts';
import type { PackRecord } from './pack-format.ts';
import { PackIndex } from './pack-index.ts';

const spaces = [namespaceNamed('n'), namespaceNamed('m')];
const keys = Array.from({ length: 40 }, (_, i) => hashNamed(i));
const turn = (): Promise<void> => new Promise((go) => setImmediate(go));
const record = (namespace: Namespace, hash: HashKey): PackRecord =>
  ({ namespace, hash, offset: 0, bytes: 4096 }) as never;
const found = (slot: number) => ({ slot, etag: `${slot}`, bytes: 8192, modifiedMs: 1, lastUseMs: 1 });

class Follower {
  readonly names = new Set<string>();
  readonly listener = ({ kind, namespace, hashes }: TierChange): void => {
    if (kind === 'cleared') this.names.clear();
    for (const hash of hashes) {
      if (kind === 'stored') this.names.add(namespace!.key + hash);
      else this.names.delete(namespace!.key + hash);
    }
  };
}

it('a random life: told is held', async () => {
  const blocks = slicing.blocks;
  slicing.blocks = 3;
  const step = fc.record({
    act: fc.constantFrom('add', 'add', 'add', 'drop', 'remove', 'hide', 'show', 'show', 'turn', 'turn', 'pages'),
    slot: fc.nat(12),
    first: fc.nat(39),
    count: fc.integer({ min: 1, max: 8 }),
  });
  const life = fc.asyncProperty(fc.array(step, { minLength: 1, maxLength: 80 }), async (steps) => {
    const index = new PackIndex();
    const all = new Follower();
    index.follow(all.listener);
    let paged = new Follower();
    let following: Following = index.followInPages(paged.listener);
    const held = (): Set<string> => {
      const names = new Set<string>();
      for (const space of spaces)
        for (const hash of keys) if (index.prefix(space, [hash]) === 1) names.add(space.key + hash);
      return names;
    };
    const settle = async (): Promise<void> => {
      for (let i = 0; i < 60; i++) await turn();
    };
    for (const { act, slot, first, count } of steps) {
      const pack = index.packs.get(slot);
      const names = keys.slice(first, first + count).map((hash, at) => record(spaces[at % 2]!, hash));
      if (act === 'add' && pack === undefined) index.add(found(slot), names);
      else if (act === 'drop' && pack !== undefined) index.drop(pack);
      else if (act === 'remove') {
        const entry = index.get(spaces[slot % 2]!, keys[first]!);
        if (entry !== undefined) index.remove(entry);
      } else if (act === 'hide') index.hide();
      else if (act === 'show') index.show();
      else if (act === 'turn') {
        following.next();
        await turn();
      } else if (act === 'pages') {
        following.end();
        paged = new Follower();
        following = index.followInPages(paged.listener);
      }
      index.checkIntegrity();
      const truth = held();
      expect(all.names).toEqual(truth);
      expect(truth.size).toBe(index.toldCount);
      for (const name of paged.names) expect(truth.has(name)).toBe(true);
    }
    index.show();
    await settle();
    while (following.next()) await turn();
    expect(index.toldCount).toBe(index.count);
    expect(all.names).toEqual(held());
    expect(paged.names).toEqual(held());
    index.close();
  });
  try {
    await fc.assert(life, { numRuns: 60 });
  } finally {
    slicing.blocks = blocks;
  }
});

it('a server that goes and comes back with 100,000 blocks costs no turn above 50 ms', async () => {
  const index = new PackIndex();
  for (let slot = 0; slot < 100; slot++) {
    const names = Array.from({ length: 1000 }, (_, i) => {
      const hash = `${slot * 1000 + i}`.padEnd(32, 'x') as HashKey;
      return record(spaces[0]!, hash);
    });
    index.add(found(slot), names);
  }
  let count = 0;
  index.follow(({ kind, hashes }) => {
    count = kind === 'cleared' ? 0 : count + hashes.length;
  });
  expect(count).toBe(100_000);
  const turns = watchTurns();
  index.hide();
  expect(count).toBe(0);
  await new Promise((resolve) => setTimeout(resolve, 5));
  index.show();
  expect(count).toBeLessThan(5000);
  while (count < 100_000) await new Promise((resolve) => setTimeout(resolve, 1));
  expect(turns.take().cpuMs).toBeLessThan(50);
  turns.end();
});

it('a pack that goes is told once for each of its namespaces', () => {
  const index = new PackIndex();
  const names = keys.map((hash, at) => record(spaces[at % 2]!, hash));
  index.add(found(1), names);
  const told: TierChange[] = [];
  index.follow((change) => told.push(change));
  index.remove(index.get(spaces[0]!, keys[0]!)!);
  told.length = 0;
  expect(index.drop(index.packs.get(1)!)).toBe(39);
  expect(told.map(({ kind, namespace, hashes }) => [kind, namespace, hashes.length])).toEqual([
    ['removed', spaces[1], 20],
    ['removed', spaces[0], 19],
  ]);
});

it('lists no more than its bound: packs that are found are left out, those of this node have the place of the coldest', () => {
  const index = new PackIndex(10);
  const told = new Follower();
  index.follow(told.listener);
  const of = (first: number, count: number) => keys.slice(first, first + count).map((hash) => record(spaces[0]!, hash));
  const held = (first: number, count: number): number => index.prefix(spaces[0]!, keys.slice(first, first + count));
  const check = (count: number, leftOut: number): void => {
    index.checkIntegrity();
    expect([index.count, told.names.size, index.leftOutCount]).toEqual([count, count, leftOut]);
  };
  for (const slot of [1, 2, 3]) index.add({ ...found(slot), lastUseMs: slot }, of(4 * slot, 4));
  check(10, 2);
  expect([held(4, 8), held(12, 4)]).toEqual([8, 2]);
  expect(index.packs.size).toBe(3); // its slot is taken
  index.add({ ...found(4), lastUseMs: 4 }, of(20, 3), true);
  check(9, 6);
  expect([held(4, 4), held(8, 4), held(20, 3)]).toEqual([0, 4, 3]);
  expect(index.packs.size).toBe(4);
  index.add({ ...found(5), lastUseMs: 5 }, of(4, 4)); // the same blocks once more, where there is room
  check(10, 9);
  expect(held(4, 4)).toBe(1);
  expect(index.drop(index.packs.get(1)!)).toBe(0);
  check(10, 5);
});

it('a block in two packs is found in the one that was made later, whichever is met first', () => {
  const blocks = keys.slice(0, 3).map((hash) => record(spaces[0]!, hash));
  for (const order of [
    [1, 2],
    [2, 1],
  ]) {
    const index = new PackIndex();
    for (const slot of order) {
      index.add({ ...found(slot), lastUseMs: slot }, blocks);
      index.touch(index.packs.get(slot)!); // a use says nothing of its age
    }
    expect(index.get(spaces[0]!, keys[0]!)?.pack.slot).toBe(2);
    expect([index.count, index.packs.get(1)!.listedCount, index.packs.get(2)!.listedCount]).toEqual([3, 0, 3]);
    index.checkIntegrity();
  }
});
