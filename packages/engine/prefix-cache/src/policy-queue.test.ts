/** Free blocks in the order of a policy, where most of a pool is held. */
import { blockPolicyNames, createPolicy, type EvictionPolicy } from '@kvtier/eviction';
import { afterEach, expect, it, vi } from 'vitest';
import { PolicyQueue } from './policy-queue.ts';

afterEach(() => vi.restoreAllMocks());

/** Counts what every policy of a name asks from now on. */
function countAsks(name: (typeof blockPolicyNames)[number]): () => number {
  let asks = 0;
  const prototype = Object.getPrototypeOf(createPolicy(name)) as EvictionPolicy;
  const counted =
    (mayEvict: (entry: number) => boolean) =>
    (entry: number): boolean => {
      asks++;
      return mayEvict(entry);
    };
  const { victim, evict } = prototype;
  vi.spyOn(prototype, 'victim').mockImplementation(function (this: EvictionPolicy, mayEvict) {
    return victim.call(this, counted(mayEvict));
  });
  vi.spyOn(prototype, 'evict').mockImplementation(function (this: EvictionPolicy, count, mayEvict) {
    return evict.call(this, count, counted(mayEvict));
  });
  return () => asks;
}

it.each(blockPolicyNames)('%s does not walk over what is held for each block that goes', (name) => {
  const held = 50_000;
  const free = 1000;
  const count = 500;
  const queue = new PolicyQueue(1 + held + free, name);
  for (let block = 1; block <= held + free; block++) queue.named(block, undefined, 16, block);
  for (let block = held + 1; block <= held + free; block++) queue.append(block);
  const asks = countAsks(name);
  expect(queue.takeFront(count)).toEqual(Array.from({ length: count }, (_, i) => held + 1 + i));
  expect(asks()).toBeLessThan(2 * (held + count));
  expect(queue.count).toBe(free - count);
  queue.checkIntegrity();
});
