import fc from 'fast-check';
import { expect, it } from 'vitest';
import { BlockTable } from './block-table.ts';

/** A chain of its own for each first number. */
const keys = (chain: number, length: number): Int32Array =>
  Int32Array.from({ length: 2 * length }, (_, i) => (i % 2 === 0 ? chain : (i >> 1) + 1));

const step = fc.record({
  chain: fc.integer({ min: 1, max: 8 }),
  length: fc.integer({ min: 1, max: 40 }),
  worker: fc.nat(3),
  leaves: fc.boolean(),
});

it('forgets of all blocks the ones that were sent the longest ago, whoever got them', () => {
  fc.assert(
    fc.property(fc.array(step, { minLength: 10, maxLength: 60 }), (steps) => {
      const table = new BlockTable({ maxBlocks: 100, maxBytes: 2 ** 20, ttlMs: 7 });
      let known: { name: string; atMs: number; workers: Set<number> }[] = [];
      for (const [now, { chain, length, worker, leaves }] of steps.entries()) {
        if (leaves && now % 5 === 0) {
          table.left(worker);
          for (const { workers } of known) workers.delete(worker);
        }
        table.sent(keys(chain, length), worker, now);
        for (let i = length - 1; i >= 0; i--) {
          const name = `${chain} ${i}`;
          const workers = known.find((block) => block.name === name)?.workers ?? new Set();
          known = known.filter((block) => block.name !== name);
          known.push({ name, atMs: now, workers: workers.add(worker) });
        }
        known = known.slice(-100).filter(({ atMs }) => now - atMs <= 7);
        const matched = [0, 1, 2, 3].map((one) => {
          let blocks = 0;
          while (known.find(({ name }) => name === `${chain} ${blocks}`)?.workers.has(one)) blocks++;
          return Math.min(blocks, 40);
        });
        expect(table.match(keys(chain, 40), [0, 1, 2, 3])).toEqual(matched);
        expect(table.size).toBe(known.length);
      }
    }),
    { numRuns: 50 },
  );
});

it('keeps its bound on bytes, also where many workers have each block', () => {
  const table = new BlockTable({ maxBlocks: 1_000, maxBytes: 100_000, ttlMs: Number.POSITIVE_INFINITY });
  for (let worker = 0; worker < 200; worker++) {
    table.sent(keys(worker % 2, 100), worker, worker);
    expect(table.bytes).toBeLessThanOrEqual(100_000);
  }
  expect(table.size).toBeGreaterThan(10);
  expect(table.match(keys(1, table.size), [199])[0]).toBeGreaterThan(0);
});

it('keeps one list of workers for all blocks in a row that went to the same ones, and forgets it with the last of these', () => {
  const table = new BlockTable({ maxBlocks: 10_000, maxBytes: 2 ** 26, ttlMs: 10 });
  for (let worker = 0; worker < 1_000; worker++) table.sent(keys(1, 200), worker, 0);
  expect(table.bytes).toBeLessThan(100_000);
  table.sent(keys(1, 100), 1_000, 0);
  const matched = table.match(keys(1, 200), [0, 1_000, 1_001, 999]);
  expect([matched, table.bytes < 100_000]).toEqual([[200, 100, 0, 200], true]);
  table.sent(keys(2, 1), 0, 100);
  expect([table.size, table.bytes < 1_000]).toEqual([1, true]);
});

it('does not keep who left of a block that is asked for all the time', () => {
  const table = new BlockTable({ maxBlocks: 10, maxBytes: 2 ** 20, ttlMs: Number.POSITIVE_INFINITY });
  for (let now = 0; now < 1_000; now++) {
    table.sent(keys(1, 1), now % 4, now);
    if (now < 999) table.left(now % 4);
  }
  expect([table.match(keys(1, 1), [3]), table.bytes < 500]).toEqual([[1], true]);
});

it('forgets many that are too old a part at a time: with the prompts that come, and not all with the first one', () => {
  const table = new BlockTable({ maxBlocks: 100_000, maxBytes: 2 ** 26, ttlMs: 60_000 });
  for (let chain = 1; chain <= 20; chain++) table.sent(keys(chain, 1_000), 0, chain);
  const sizes = [table.size];
  for (let now = 100_000; table.size > 1; now++) {
    table.sent(keys(1_000, 1), 0, now);
    sizes.push(table.size);
  }
  const most = Math.max(...sizes.slice(1).map((size, i) => sizes[i]! - size));
  expect([sizes[0], most <= 512, sizes.length < 50]).toEqual([20_000, true, true]);
});
