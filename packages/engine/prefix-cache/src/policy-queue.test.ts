/** Free blocks in the order of a policy, where most of a pool is held. */
import { blockPolicyNames, createPolicy, type EvictionPolicy } from '@kvtier/eviction';
import { afterEach, describe, expect, it, vi } from 'vitest';
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
  const held = 10_000;
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

describe('what comes first, asked for at every step,', () => {
  /** Of `count` blocks every tenth is free. */
  function filled(name: (typeof blockPolicyNames)[number], count: number): PolicyQueue {
    const queue = new PolicyQueue(1 + count, name);
    for (let block = 1; block <= count; block++) queue.named(block, undefined, 16, block);
    for (let block = 10; block <= count; block += 10) queue.append(block);
    return queue;
  }

  /** Walks along a policy's order from now on, and how much they looked at. */
  function countWalks(name: (typeof blockPolicyNames)[number]): { walks: number; looked: number } {
    const seen = { walks: 0, looked: 0 };
    const prototype = Object.getPrototypeOf(createPolicy(name)) as EvictionPolicy;
    const { coldestFirst } = prototype;
    vi.spyOn(prototype, 'coldestFirst').mockImplementation(function* (this: EvictionPolicy) {
      seen.walks++;
      for (const entry of coldestFirst.call(this)) {
        seen.looked++;
        yield entry;
      }
    });
    return seen;
  }

  it.each(blockPolicyNames)('%s is walked along once while nothing changes', (name) => {
    const queue = filled(name, 10_000);
    const first = queue.toArray().slice(0, 256);
    const seen = countWalks(name);
    const told = Array.from({ length: 100 }, () => queue.first(256));
    for (const blocks of told) expect(blocks).toEqual(first);
    expect(seen.walks).toBe(1);
    expect(seen.looked).toBeLessThanOrEqual(10_000);
  });

  it.each(blockPolicyNames)(
    '%s is walked along again when a part was reused, and what comes is known all the while',
    (name) => {
      const queue = filled(name, 2_000);
      const seen = countWalks(name);
      for (let step = 0; step < 50; step++) {
        expect(queue.first(64)).toEqual(queue.toArray().slice(0, 64)); // a walk of its own
        for (const block of queue.takeFront(8)) {
          queue.named(block, undefined, 16, 3_000 + 8 * step + block);
          queue.append(block);
        }
      }
      expect(seen.walks - 50).toBe(25); // 16 changes a step, and 32 blocks to spare
      queue.checkIntegrity();
    },
  );

  it.each(blockPolicyNames)('%s is looked at in pieces where much is held, and what is free is found', (name) => {
    const piece = name === 'lru' || name === 'lfu' ? 65_536 : 4_096;
    const held = piece > 20_000 ? 100_000 : 20_000; // a few pieces
    const queue = new PolicyQueue(1 + held + 2_000, name);
    // One chain that is held, and single blocks.
    for (let block = 1; block <= held + 2_000; block++)
      queue.named(block, block > 1 && block <= held ? block - 1 : undefined, 16, block);
    for (let block = held + 1; block <= held + 2_000; block++) queue.append(block);
    const seen = countWalks(name);
    const mostCalls = Math.ceil((held + 2_000) / piece);
    /** What is told, call by call; more is reused and freed in between than a finished walk is good for. */
    const calls = (count: number): number[][] =>
      Array.from({ length: count }, (_, call) => {
        seen.looked = 0;
        const told = queue.first(256);
        expect(seen.looked).toBeLessThanOrEqual(piece);
        expect(told.every((block) => queue.has(block))).toBe(true);
        for (const block of queue.takeFront(8)) {
          queue.named(block, undefined, 16, 1_000_000 + 8 * call + block);
          queue.append(block);
        }
        return told;
      });
    const first = calls(mostCalls);
    const begun = first.findIndex((told) => told.length > 0);
    expect(begun).toBe(Math.floor((held + 384) / piece));
    expect(first[begun]).toEqual(Array.from({ length: 256 }, (_, i) => held + 8 * begun + 1 + i));
    // While the next walk is under way, what the last one has found is told, as far as it is there.
    for (const told of [...first.slice(begun), ...calls(2 * mostCalls + 16)]) expect(told.length).toBeGreaterThan(128);
    expect(seen.walks).toBeGreaterThan(1);
    queue.checkIntegrity();
  });

  it.each(blockPolicyNames)('%s: nearly all that is reused was told before, however much a step takes', (name) => {
    const held = 30_000;
    const queue = new PolicyQueue(1 + held + 20_000, name);
    for (let block = 1; block <= held + 20_000; block++)
      queue.named(block, block > 1 && block <= held ? block - 1 : undefined, 16, block);
    for (let block = held + 1; block <= held + 20_000; block++) queue.append(block);
    const told = new Set<number>();
    const [warm, steps, perStep] = [40, 300, 128];
    let missed = 0;
    for (let step = 0; step < steps; step++) {
      for (const block of queue.first(256)) told.add(block);
      const taken = queue.takeFront(perStep);
      for (const block of taken) {
        if (!told.delete(block) && step >= warm) missed++;
        queue.named(block, undefined, 16, 1_000_000 + perStep * step + block);
      }
      for (const block of taken) queue.append(block);
    }
    expect(missed).toBeLessThan(0.05 * (steps - warm) * perStep);
    queue.checkIntegrity();
  });

  it('what was used since is not among it', () => {
    const queue = filled('lru', 2_000);
    const [used] = queue.first(64);
    queue.remove(used!);
    queue.used(used!);
    expect(queue.first(64)).not.toContain(used);
    queue.append(used!);
    expect(queue.first(64)).toEqual(queue.toArray().slice(0, 64));
  });

  it('is looked for again as soon as another block went than was thought', () => {
    const queue = filled('lfu', 2_000);
    for (let block = 10; block <= 2_000; block += 10) queue.used(block);
    queue.first(64);
    for (const block of [1, 2, 3]) queue.append(block); // used less than all that were free
    expect(queue.takeFront(1)).toEqual([1]);
    expect(queue.first(64)).toEqual(queue.toArray().slice(0, 64));
    expect(queue.first(2)).toEqual([2, 3]);
  });
});
