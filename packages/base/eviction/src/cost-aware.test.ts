/** The cost-aware policy against a naive model of itself, and what it is for. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { CostAwarePolicy } from './cost-aware.ts';

interface Naive {
  readonly entry: number;
  readonly cost: number;
  readonly parent: Naive | undefined;
  uses: number;
  value: number;
  order: number;
}

const operation = fc.record({
  kind: fc.constantFrom('insert', 'child', 'child', 'touch', 'touch', 'remove', 'evict', 'evict'),
  entry: fc.nat(30),
  other: fc.nat(30),
  cost: fc.integer({ min: 1, max: 4 }),
});

it('equals its naive model on random operations', () => {
  fc.assert(
    fc.property(fc.array(operation, { maxLength: 150 }), fc.nat(7), (operations, held) => {
      const policy = new CostAwarePolicy();
      let items: Naive[] = [];
      let age = 0;
      let clock = 0;
      const find = (entry: number): Naive | undefined => items.find((item) => item.entry === entry);
      const victim = (mayEvict: (entry: number) => boolean): Naive | undefined =>
        items
          .filter((item) => mayEvict(item.entry) && !items.some(({ parent }) => parent === item))
          .sort((a, b) => a.value - b.value || a.order - b.order)[0];
      for (const { kind, entry, other, cost } of operations) {
        const one = find(entry);
        if ((kind === 'insert' || kind === 'child') && !one) {
          const parent = kind === 'child' ? find(other) : undefined;
          policy.insert(entry, 0, { parent: kind === 'child' ? other : undefined, cost, bytes: 2 });
          items.push({ entry, cost: cost / 2, parent, uses: 1, value: age + cost / 2, order: ++clock });
        } else if (kind === 'touch' && one) {
          policy.touch(entry, 0);
          one.value = age + ++one.uses * one.cost;
          one.order = ++clock;
        } else if (kind === 'remove' && one) {
          policy.victim(() => false); // nobody is chosen: this is no eviction
          policy.remove(entry);
          items = items.filter((item) => item !== one);
        } else if (kind === 'evict') {
          const mayEvict = (candidate: number): boolean => candidate % 8 !== held;
          const expected = victim(mayEvict);
          expect(policy.victim(mayEvict)).toBe(expected?.entry);
          if (!expected) continue;
          policy.remove(expected.entry);
          items = items.filter((item) => item !== expected);
          age = Math.max(age, expected.value);
        }
        policy.checkIntegrity();
        expect(policy.count).toBe(items.length);
      }
      const foretold = [...policy.coldestFirst()];
      const happened = foretold.map(() => {
        const next = policy.victim(() => true)!;
        policy.remove(next);
        return next;
      });
      expect(foretold).toEqual(happened);
      expect(policy.count).toBe(0);
    }),
    { numRuns: 300 },
  );
});

it('keeps what is dear to compute, and forgets what was dear long ago', () => {
  const policy = new CostAwarePolicy();
  policy.insert(0, 0, { cost: 10 });
  const evictions: number[] = [];
  for (let entry = 1; entry < 30; entry++) {
    policy.insert(entry, 0, { cost: 1 });
    if (policy.count <= 2) continue;
    const victim = policy.victim(() => true)!;
    policy.remove(victim);
    evictions.push(victim);
  }
  // Cheap ones go round in their order; each loss raises the value of what comes by 1, until the dear one is the least.
  expect(evictions.slice(0, 3)).toEqual([1, 2, 3]);
  expect(evictions.indexOf(0)).toBeGreaterThan(5);
});

it('evicts the leaf of a chain before its root, although the leaf is dearer', () => {
  const policy = new CostAwarePolicy();
  policy.insert(0, 0, { cost: 1 });
  policy.insert(1, 0, { cost: 5, parent: 0 });
  expect([...policy.coldestFirst()]).toEqual([1, 0]);
});

it('misuse is a defect, not a state', () => {
  const policy = new CostAwarePolicy();
  policy.insert(3, 0);
  expect(() => policy.insert(3, 0)).toThrow('cost-aware: entry 3 is tracked already');
  expect(() => policy.touch(4, 0)).toThrow('cost-aware: entry 4 is not tracked');
  expect(() => policy.remove(4)).toThrow('cost-aware: entry 4 is not tracked');
  expect(() => policy.insert(-1, 0)).toThrow('cost-aware: -1 is not an entry');
});
