/** In which order blocks of one size leave while many of them are kept. */
import { type PolicyName, policyNames } from '@kvtier/eviction';
import { EntryLists } from '@kvtier/eviction/testing';
import fc from 'fast-check';
import { describe, expect, it, vi } from 'vitest';
import { mostPassed } from '../kit/passing-over.ts';
import { SizeClass } from './size-class.ts';

interface Block {
  readonly name: number;
  readonly parent: number | undefined;
  readonly index: number;
  isKept: boolean;
  readonly usedUs: number;
  placedAtBytes: number;
  toldAtBytes: number;
}

/** Blocks 0 to `count`, in this order, of which the first `kept` may not go; these are one chain if `isChain`. */
class World {
  readonly blocks: Block[] = [];
  readonly live = new Set<Block>();
  looks = 0;
  parentsAsked = 0;
  readonly class: SizeClass<Block>;

  constructor(policy: PolicyName, count: number, kept: number, isChain = false, mayPass?: number, capacity = 1e9) {
    this.class = new SizeClass({
      policy,
      mayPass,
      isIdle: ({ isKept }) => ++this.looks > 0 && !isKept,
      nameOf: ({ name }) => name,
      publishedBytes: () => this.blocks.length,
      capacityBytes: capacity,
      parentOf: ({ parent }) => {
        this.parentsAsked++;
        const above = parent === undefined ? undefined : this.blocks[parent]!;
        return above !== undefined && this.live.has(above) ? above : undefined;
      },
    });
    for (let name = 0; name < count; name++) {
      this.put(name < kept, isChain && name > 0 && name < kept ? name - 1 : undefined);
    }
  }

  put(isKept: boolean, parent?: number): void {
    const block = {
      name: this.blocks.length,
      parent,
      index: this.class.nextIndex,
      isKept,
      usedUs: 0,
      placedAtBytes: 0,
      toldAtBytes: 0,
    };
    this.blocks.push(block);
    this.live.add(block);
    this.class.add(block);
  }

  /** The name of the coldest that nobody keeps, which goes. */
  evict(): number | undefined {
    const victim = this.class.coldest();
    if (victim === undefined) return undefined;
    this.class.evicted(victim);
    this.class.remove(victim);
    this.live.delete(victim);
    return victim.name;
  }

  release(name: number): void {
    this.blocks[name]!.isKept = false;
    this.class.idle(this.blocks[name]!);
  }

  all(): number[] {
    const order: number[] = [];
    for (let name = this.evict(); name !== undefined; name = this.evict()) order.push(name);
    return order;
  }
}

it.each(['fifo', 's3-fifo'] as const)('under %s what comes late to many old chains leaves no long walk', (policy) => {
  const [chains, length, capacity] = [32, 64, 4_096];
  const world = new World(policy, 0, 0, false, undefined, capacity);
  const ends = Array.from({ length: chains }, () => {
    for (let at = 0; at < length; at++) world.put(false, at > 0 ? world.blocks.length - 1 : undefined);
    return world.blocks.length - 1;
  });
  while (world.live.size < capacity - chains) world.put(false);
  for (const end of ends) world.put(false, end); // as a slower tier brings them: nobody says before that these chains grow
  const looks = [vi.spyOn(EntryLists.prototype, 'coldest'), vi.spyOn(EntryLists.prototype, 'warmer')];
  let most = 0;
  for (let round = 0; round < capacity; round++) {
    for (const look of looks) look.mockClear();
    world.evict();
    most = Math.max(most, looks[0]!.mock.calls.length + looks[1]!.mock.calls.length);
    world.put(false);
  }
  for (const look of looks) look.mockRestore();
  expect(most).toBeLessThan(16);
  world.class.checked();
});

describe.each(policyNames)('under %s the coldest idle block', (policy) => {
  it('is found without a look at all that is kept each time', () => {
    const [kept, count, rounds] = [1_000, 5_000, 2_000];
    const world = new World(policy, count, kept);
    for (let round = 0; round < rounds; round++) {
      expect(world.evict()).toBe(kept + round); // in the order of their use, all the same
      world.put(false);
    }
    expect(world.looks).toBeLessThanOrEqual(2 * kept + rounds);
    world.class.checked();
  });

  it('leaves the few in their place that are being read', () => {
    const world = new World(policy, 200, 64);
    expect(world.evict()).toBe(64);
    for (let name = 0; name < 64; name++) world.release(name);
    expect(world.all().slice(0, 3)).toEqual([0, 1, 2]);
  });

  it('is none where all are kept, and each of them when it is kept no more', () => {
    const world = new World(policy, 100, 100);
    expect([world.evict(), world.evict()]).toEqual([undefined, undefined]);
    for (let name = 0; name < 100; name++) world.release(name);
    world.class.checked();
    expect(world.all().toSorted((a, b) => a - b)).toEqual(Array.from({ length: 100 }, (_, name) => name));
  });

  it('of a kept chain is its end when it is kept no more, in whatever order that is said', () => {
    const length = 100;
    for (const isFromEnd of [false, true]) {
      const world = new World(policy, 2 * length, length, true);
      for (let round = 0; round < 10; round++) expect(world.evict()).toBe(length + round);
      const chain = Array.from({ length }, (_, at) => (isFromEnd ? length - 1 - at : at));
      for (const name of chain) world.release(name);
      world.class.checked();
      const order = world.all().filter((name) => name < length);
      expect(order).toEqual(Array.from({ length }, (_, at) => length - 1 - at));
    }
  });
});

it.each(['fifo', 's3-fifo'] as const)('%s lets a chain go from its end also where its root was not kept', (policy) => {
  const world = new World(policy, 0, 0, false, 0);
  world.put(false); // 0 ← 1 ← 2
  world.put(true, 0);
  world.put(true, 1);
  world.put(false, 0);
  expect(world.evict()).toBe(3); // what is kept is aside now
  world.put(false, 2);
  for (const name of [2, 1]) world.release(name);
  expect(world.all()).toEqual([4, 2, 1, 0]);
});

it('s3-fifo does not walk over a kept chain each time, though it asks about its end alone', () => {
  const length = 1_000;
  const world = new World('s3-fifo', 2 * length, length, true);
  world.evict();
  const before = world.looks;
  for (let round = 0; round < 100; round++) world.evict();
  expect(world.looks - before).toBe(100); // nothing of the chain is in its order any more
});

it('what s3-fifo put aside is worth as much as before when it comes back', () => {
  const world = new World('s3-fifo', 1_000, 100);
  const used = world.blocks[50]!;
  for (let use = 0; use < 3; use++) world.class.touch(used);
  world.evict();
  for (let name = 0; name < 100; name++) world.release(name);
  const order = world.all();
  expect(order.at(-1)).toBe(used.name);
  expect(order.indexOf(0)).toBe(899); // as if it had just come
});

describe.each(['fifo', 's3-fifo'] as const)('under %s', (policy) => {
  it('no block goes before its child, whatever is kept meanwhile', () => {
    const step = fc.record({
      act: fc.constantFrom('put', 'under', 'under', 'under', 'keep', 'release', 'release', 'touch', 'evict', 'evict'),
      on: fc.nat(1_000),
      isKept: fc.boolean(),
    });
    const steps = fc.array(step, { minLength: 1, maxLength: 120 });
    fc.assert(
      fc.property(steps, fc.nat(3), (all, mayPass) => {
        const world = new World(policy, 3, 0, false, mayPass);
        for (const { act, on, isKept } of all) {
          const block = [...world.live][on % Math.max(1, world.live.size)];
          if (act === 'put' || block === undefined) world.put(isKept);
          else if (act === 'under') world.put(isKept, block.name);
          else if (act === 'keep') block.isKept = true;
          else if (act === 'release') world.release(block.name);
          else if (act === 'touch') world.class.touch(block);
          else evict(world);
          world.class.checked();
        }
        for (const { name } of world.live) world.release(name);
        while (world.live.size > 0) evict(world);
      }),
      { numRuns: 500 },
    );
    /** Against a look at all blocks. */
    function evict(world: World): void {
      const before = [...world.live];
      const victim = world.evict();
      const childrenOf = ({ name }: Block): Block[] => before.filter((other) => other.parent === name);
      const isAllKept = (block: Block): boolean => block.isKept && childrenOf(block).every(isAllKept);
      const idle = before.filter(({ isKept }) => !isKept);
      const ends = idle.filter((block) => childrenOf(block).length === 0);
      const mayGo = ends.length > 0 ? ends : idle.filter((block) => childrenOf(block).every(isAllKept));
      if (victim !== undefined) expect(mayGo.map(({ name }) => name)).toContain(victim);
      else expect(mayGo).toEqual([]);
    }
  });

  it.each([
    ['few', 10],
    ['many', 100],
  ])('%s chains of which the ends are kept make room from there on', (_, chains) => {
    const length = 60;
    const world = new World(policy, 0, 0);
    for (let at = 0; at < chains * length; at++) {
      world.put(at % length === length - 1, at % length === 0 ? undefined : at - 1);
    }
    const idle = chains * (length - 1);
    expect(world.all()).toHaveLength(idle);
    world.class.checked();
    const ends = [...world.live].map(({ name }) => name);
    for (const name of ends) world.release(name);
    expect(world.all().toSorted((a, b) => a - b)).toEqual(ends);
  });

  it.each(['leaves', 'a chain'])('%s beyond number that are kept are put aside a part at a time', (what) => {
    const kept = 2 * mostPassed + 1_000;
    const world = new World(policy, kept + 10, kept, what === 'a chain');
    let before = world.parentsAsked;
    for (let round = 0; round < 6; round++) {
      expect(world.evict()).toBe(kept + round);
      expect(world.parentsAsked - before).toBeLessThanOrEqual(mostPassed + 1);
      before = world.parentsAsked;
    }
    world.class.checked();
    const looks = world.looks;
    world.evict();
    expect([world.looks - looks, world.parentsAsked]).toEqual([1, before]); // all of them are by now
    expect(world.parentsAsked).toBeGreaterThanOrEqual(2 * kept);
    for (let name = 0; name < kept; name++) world.release(name);
    world.class.checked();
    expect(world.all()).toHaveLength(kept + 10 - 7);
  });
});

it.each(['fifo', 's3-fifo'] as const)('%s gives no slab of a parent before an idle child in another one', (policy) => {
  const world = new World(policy, 0, 0);
  world.put(false);
  world.put(false, 0);
  const freeable = (): number | undefined => world.class.coldestOf(({ name }) => name === 0)?.name;
  expect(freeable()).toBeUndefined();
  world.blocks[1]!.isKept = true;
  expect(freeable()).toBe(0);
});
