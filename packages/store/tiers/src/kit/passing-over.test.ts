/** How often blocks that may not go are looked at, and what becomes of their order. */
import { createPolicy, type PolicyName } from '@kvtier/eviction';
import { describe, expect, it } from 'vitest';
import { manyPassed, victimPassingOver } from './passing-over.ts';

/** Entries 0 to `count`, in this order, of which the first `kept` may not go. */
function world(name: PolicyName, count: number, kept: number) {
  const policy = createPolicy(name);
  for (let index = 0; index < count; index++) policy.insert(index, 0);
  const seen = { looks: 0, passed: [] as number[] };
  const mayGo = (index: number): boolean => ++seen.looks > 0 && index >= kept;
  const onPassed = (passed: ReadonlySet<number>): void => void seen.passed.push(...passed);
  return { policy, seen, victim: () => victimPassingOver(policy, { mayGo, onPassed }) };
}

describe.each(['lru', 'lfu'] as const)('under %s', (name) => {
  it('many are passed over once, and keep their order among themselves', () => {
    const kept = manyPassed + 1;
    const { policy, seen, victim } = world(name, kept + 100, kept);
    for (let round = 0; round < 100; round++) {
      expect(victim()).toBe(kept + round);
      policy.remove(kept + round);
    }
    expect([seen.looks, seen.passed]).toEqual([kept + 100, []]);
    expect([...policy.coldestFirst()]).toEqual(Array.from({ length: kept }, (_, index) => index));
  });

  it('a few keep their place before all others', () => {
    const { policy, seen, victim } = world(name, 2 * manyPassed, manyPassed);
    expect([victim(), victim()]).toEqual([manyPassed, manyPassed]);
    expect([seen.looks, [...policy.coldestFirst()][0]]).toEqual([2 * (manyPassed + 1), 0]);
  });

  it('none may go', () => {
    expect(world(name, 100, 100).victim()).toBeUndefined();
    expect(world(name, 0, 0).victim()).toBeUndefined();
  });
});

describe.each(['fifo', 's3-fifo'] as const)('under %s, where no touch helps', (name) => {
  it('the owner hears what was passed over, each once, and of nothing when nothing was', () => {
    const { seen, victim } = world(name, 100, 100);
    expect(victim()).toBeUndefined();
    expect(seen.passed.toSorted((a, b) => a - b)).toEqual(Array.from({ length: 100 }, (_, index) => index));
    const free = world(name, 3, 0);
    expect([free.victim(), free.seen.passed]).toEqual([0, []]);
  });
});
