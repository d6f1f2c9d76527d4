/** LFU with aging: what was used often goes in the end, and no turn is long for it. */
import { afterEach, expect, it, vi } from 'vitest';
import { EntryLists } from './entry-lists.ts';
import { LfuPolicy } from './lfu.ts';

afterEach(() => vi.restoreAllMocks());

/** A store of so many blocks; `use` returns whether it held the block. */
function storeOf(size: number) {
  const policy = new LfuPolicy();
  const held = new Map<number, number>();
  const nameOf: number[] = [];
  const use = (name: number): boolean => {
    const found = held.get(name);
    if (found !== undefined) {
      policy.touch(found, 0);
      return true;
    }
    let entry = held.size;
    if (entry === size) {
      entry = policy.victim(() => true)!;
      policy.remove(entry);
      held.delete(nameOf[entry]!);
    }
    nameOf[entry] = name;
    held.set(name, entry);
    policy.insert(entry, 0);
    return false;
  };
  const hits = (first: number, count: number): number =>
    Array.from({ length: count }, (_, at) => use(first + at)).filter(Boolean).length;
  return { policy, held, hits };
}

it.each([3, 300])('the workload changes: what was used %i times before leaves for what is used now', (uses) => {
  const { policy, hits } = storeOf(100);
  for (let round = 0; round < uses; round++) hits(0, 100);
  const rounds = Array.from({ length: 8 }, () => hits(1_000, 80));
  expect(rounds[0]).toBe(0);
  expect(rounds.at(-1)).toBe(80);
  expect(hits(1_000, 80)).toBe(80);
  policy.checkIntegrity();
});

it('what is used often stays while others come that are used once, for as many exchanges of these as it was used', () => {
  const { held, hits } = storeOf(100);
  for (let round = 0; round < 10; round++) hits(0, 50);
  const left = (): number => [...held.keys()].filter((name) => name < 50).length;
  hits(1_000, 9 * 50);
  expect(left()).toBe(50);
  hits(2_000, 3 * 50);
  expect(left()).toBe(0);
});

it('what may not go for ever so long is taken along a few at a time, and goes first when it may', () => {
  const kept = 1_000;
  const policy = new LfuPolicy();
  for (let entry = 0; entry < kept; entry++) policy.insert(entry, 0);
  const moves = vi.spyOn(EntryLists.prototype, 'move');
  let most = 0;
  for (let turn = 0; turn < 5_000; turn++) {
    policy.insert(kept, 0);
    moves.mockClear();
    expect(policy.victim((entry) => entry >= kept)).toBe(kept);
    policy.remove(kept);
    most = Math.max(most, moves.mock.calls.length);
  }
  policy.checkIntegrity();
  expect(most).toBe(64);
  for (let turn = 0; turn < 3; turn++) policy.insert(kept + turn, 0);
  expect(policy.evict(kept, () => true)).toEqual(Array.from({ length: kept }, (_, entry) => entry));
});

it('what may not go for long goes before what it depends on, however seldom it was used', () => {
  const [parent, child, later, passing] = [0, 1, 2, 3];
  const policy = new LfuPolicy();
  policy.insert(parent, 0);
  policy.insert(child, 0, { parent });
  for (let use = 0; use < 60; use++) policy.touch(parent, 0);
  policy.insert(later, 0, { parent: child });
  for (let turn = 0; turn < 1_000; turn++) {
    policy.insert(passing, 0);
    expect(policy.victim((entry) => entry === passing)).toBe(passing);
    policy.remove(passing);
    // The child has fallen behind: then the parent has, too.
    if (turn === 280 || turn === 900) expect([...policy.coldestFirst()]).toEqual([later, child, parent]);
  }
  policy.checkIntegrity();
  policy.touch(later, 0);
  expect(policy.evict(3, () => true)).toEqual([child, parent, later]);
  policy.insert(parent, 0);
  expect(policy.victim(() => true)).toBe(parent);
});
