/** The order that a policy foretells: as things stood when it was asked for, however long the walk along it takes. */
import fc from 'fast-check';
import { afterEach, describe, expect, it, vi } from 'vitest';
import { blockPolicyNames, createPolicy, type EvictionPolicy } from './index.ts';
import { IndexedHeap } from './indexed-heap.ts';

afterEach(() => vi.restoreAllMocks());

const change = fc.record({
  kind: fc.constantFrom('insert', 'child', 'child', 'touch', 'touch', 'remove', 'evict', 'walk', 'break off'),
  entry: fc.nat(150), // their tables grow on the way
  other: fc.nat(150),
});

function apply(
  policy: EvictionPolicy,
  { kind, entry, other }: typeof change extends fc.Arbitrary<infer T> ? T : never,
) {
  const isTracked = policy.has(entry);
  if (kind === 'insert' && !isTracked) policy.insert(entry, 0, { name: entry });
  else if (kind === 'child' && !isTracked) policy.insert(entry, 0, { name: entry, parent: other });
  else if (kind === 'touch' && isTracked) policy.touch(entry, 0);
  else if (kind === 'remove' && isTracked) policy.remove(entry);
  else if (kind === 'evict') policy.evict(2, () => true);
  else if (kind === 'walk') expect([...policy.coldestFirst()]).toHaveLength(policy.count);
  else if (kind === 'break off') for (const _ of policy.coldestFirst()) break;
}

describe.each(blockPolicyNames)('%s', (name) => {
  it('foretells the same whatever changes during the walk, other walks included', () => {
    const changes = fc.array(change, { maxLength: 60 });
    fc.assert(
      fc.property(changes, changes, fc.nat(20), (before, meanwhile, at) => {
        const policy = createPolicy(name);
        for (const one of before) apply(policy, one);
        const foretold = [...policy.coldestFirst()];
        const walk = policy.coldestFirst()[Symbol.iterator]();
        const seen: number[] = [];
        // At least one, with which the walk begins.
        for (let next = walk.next(); !next.done; next = walk.next()) {
          seen.push(next.value);
          if (seen.length === Math.min(at + 1, foretold.length)) for (const one of meanwhile) apply(policy, one);
        }
        expect(seen).toEqual(foretold);
        policy.checkIntegrity();
        for (const entry of [...policy.coldestFirst()]) {
          expect(policy.victim(() => true)).toBe(entry);
          policy.remove(entry);
        }
      }),
      { numRuns: 200 },
    );
  });
});

it('cost-aware tells the first few of many without a step for each', () => {
  const policy = createPolicy('cost-aware');
  for (let at = 0; at < 20_000; at++) policy.insert(at, 0, { parent: at % 100 === 0 ? undefined : at - 1 });
  const steps = vi.spyOn(IndexedHeap.prototype, 'add');
  const first: number[] = [];
  for (const entry of policy.coldestFirst()) if (first.push(entry) === 3) break;
  // Those before the first two are candidates now, in the walk's own copy.
  expect([first, steps.mock.calls.length]).toEqual([[99, 98, 97], 2]);
});
