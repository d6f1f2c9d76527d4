import { createPolicy } from '@kvtier/eviction';
import { describe, expect, it } from 'vitest';
import { idleVictim } from './idle-victim.ts';

/** Entries 0 to `count`, in this order, of which the first `kept` may not go. */
const listOf = (count: number, kept: number) => {
  const policy = createPolicy('lru');
  const entries = Array.from({ length: count }, (_, index) => ({ index, isKept: index < kept }));
  for (const { index } of entries) policy.insert(index, 0);
  return { policy, entries };
};

describe('the coldest idle block', () => {
  it('is found without a look at all that is kept each time', () => {
    const [kept, count, rounds] = [1_000, 5_000, 2_000];
    const list = listOf(count, kept);
    let looks = 0;
    for (let round = 0; round < rounds; round++) {
      const found = idleVictim(list, ({ isKept }) => ++looks > 0 && !isKept, 0);
      expect(found!.index).toBe(kept + round); // in the order of their use, all the same
      list.policy.remove(found!.index);
      list.policy.insert(count + round, 0);
      list.entries.push({ index: count + round, isKept: false });
    }
    expect(looks).toBe(kept + rounds);
    expect([...list.policy.coldestFirst()].filter((index) => index < kept)).toEqual(
      Array.from({ length: kept }, (_, i) => i),
    );
  });

  it('leaves the few in their place that are being read', () => {
    const list = listOf(200, 64);
    expect(idleVictim(list, ({ isKept }) => !isKept, 0)!.index).toBe(64);
    expect([...list.policy.coldestFirst()].slice(0, 3)).toEqual([0, 1, 2]);
  });

  it('is none where all are kept', () => {
    expect(idleVictim(listOf(100, 100), ({ isKept }) => !isKept, 0)).toBeUndefined();
  });
});
