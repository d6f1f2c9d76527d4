/** Several at once: the same as one after another, and what may not go is walked over once. */
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { FifoPolicy } from './fifo.ts';
import { blockPolicyNames, createPolicy, type EvictionPolicy } from './index.ts';
import { S3FifoPolicy } from './s3-fifo.ts';

const step = fc.record({
  kind: fc.constantFrom('insert', 'child', 'child', 'touch', 'touch', 'remove', 'evict', 'park', 'unpark'),
  entry: fc.nat(50),
  other: fc.nat(50),
  count: fc.nat(12),
  name: fc.option(fc.nat(20), { nil: undefined }),
});

/** As `evict` says it is. */
function oneByOne(policy: EvictionPolicy, count: number, mayEvict: (entry: number) => boolean): number[] {
  const evicted: number[] = [];
  while (evicted.length < count) {
    const victim = policy.victim(mayEvict);
    if (victim === undefined) break;
    policy.remove(victim);
    evicted.push(victim);
  }
  return evicted;
}

const kinds = blockPolicyNames.map((kind) => [kind, () => createPolicy(kind)] as const);
const ofShortWalks = ['s3-fifo of short walks', () => new S3FifoPolicy(undefined, 2)] as const;

describe.each([...kinds, ofShortWalks])('%s', (_, make: () => EvictionPolicy) => {
  it('evicts several as if each were chosen alone', () => {
    fc.assert(
      fc.property(fc.array(step, { maxLength: 150 }), fc.nat(2), (steps, held) => {
        const mayEvict = (entry: number): boolean => entry % 3 !== held;
        const policy = make();
        const twin = make();
        const parked = new Set<number>();
        for (const { kind: act, entry, other, count, name } of steps) {
          if (act === 'evict') expect(policy.evict(count, mayEvict)).toEqual(oneByOne(twin, count, mayEvict));
          const isParked = parked.has(entry) && policy.has(entry);
          if (act === 'park' && policy.has(entry)) parked.add(entry);
          else if (act === 'unpark' || act === 'remove') parked.delete(entry);
          for (const each of [policy, twin]) {
            if (act === 'insert' && !each.has(entry)) each.insert(entry, 0, { name, cost: 1 + (entry % 5) });
            else if (act === 'child' && !each.has(entry)) each.insert(entry, 0, { parent: other, name });
            else if (act === 'touch' && each.has(entry)) each.touch(entry, 0);
            else if (act === 'remove' && each.has(entry)) each.remove(entry);
            // What comes back stands behind its children, too.
            else if (act === 'park' && each.has(entry) && !isParked) each.park?.(entry);
            else if (act === 'unpark' && isParked) each.unpark?.(entry);
          }
          policy.checkIntegrity();
          expect(policy.count).toBe(twin.count);
        }
        expect([...policy.coldestFirst()]).toEqual([...twin.coldestFirst()]);
      }),
      { numRuns: 500 },
    );
  });

  it('asks about what is held once for all that go, however cold it is', () => {
    const held = 20_000;
    const count = 500;
    const policy = make();
    for (let entry = 0; entry < held + 2 * count; entry++) policy.insert(entry, 0);
    for (let entry = held; entry < held + 2 * count; entry++) policy.touch(entry, 0);
    let asked = 0;
    const evicted = policy.evict(count, (entry) => {
      asked++;
      return entry >= held;
    });
    expect(evicted).toEqual(Array.from({ length: count }, (_, i) => held + i));
    expect(asked).toBeLessThan(2 * (held + 2 * count));
  });

  it('chooses nothing where nothing may go, and no more than there is', () => {
    const policy = make();
    for (let entry = 0; entry < 4; entry++) policy.insert(entry, 0);
    expect([policy.evict(2, () => false), policy.evict(0, () => true), policy.evict(9, () => true)]).toEqual([
      [],
      [],
      [0, 1, 2, 3],
    ]);
  });
});

it.each([new FifoPolicy(0), new S3FifoPolicy(0)])(
  '$name takes a parent that stood aside before what the walk has passed',
  (policy) => {
    policy.insert(0, 0);
    policy.insert(1, 0);
    policy.insert(2, 0, { parent: 1 });
    policy.victim(() => false); // puts 1 aside
    policy.insert(3, 0);
    expect(policy.evict(3, (entry) => entry !== 0)).toEqual([2, 1, 3]);
  },
);

it('s3-fifo takes a parent that the walk has passed as soon as its last child has gone from the other queue', () => {
  const policy = new S3FifoPolicy();
  for (let entry = 0; entry < 4; entry++) policy.insert(entry, 0, { parent: entry === 2 ? 1 : undefined });
  for (let uses = 0; uses < 2; uses++) policy.touch(2, 0);
  expect(policy.evict(4, (entry) => entry === 1 || entry === 2)).toEqual([2, 1]);
});

describe.each(['fifo', 's3-fifo'] as const)('%s of more parents than keep their place', (kind) => {
  it('lets children go before their parents', () => {
    const chains = 100;
    const length = 20;
    const policy = createPolicy(kind);
    // Parents come first, and stand before children that come when something else has come to `main`.
    for (let chain = 0; chain < chains; chain++) policy.insert(chain * length, 0, { name: chain });
    for (let chain = 0; chain < chains; chain++) {
      policy.touch(chain * length, 0);
      policy.touch(chain * length, 0);
    }
    policy.victim(() => false);
    for (let at = 1; at < length; at++) {
      for (let chain = 0; chain < chains; chain++) {
        policy.insert(chain * length + at, 0, { parent: chain * length + at - 1 });
        if (at % 3 === 0) for (let uses = 0; uses < 2; uses++) policy.touch(chain * length + at, 0);
      }
      policy.victim(() => false);
    }
    const mayEvict = (entry: number): boolean => entry % length !== 7;
    const gone = new Set<number>();
    const early: number[] = [];
    while (policy.count > 0) {
      const evicted = policy.evict(50, mayEvict);
      if (evicted.length === 0) break;
      for (const entry of evicted) {
        const follower = entry + 1;
        if (follower % length !== 0 && !gone.has(follower) && mayEvict(follower)) early.push(entry);
        gone.add(entry);
      }
      policy.checkIntegrity();
    }
    expect([policy.count, early]).toEqual([chains, []]);
  });
});
