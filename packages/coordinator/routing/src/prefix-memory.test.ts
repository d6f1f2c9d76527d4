import { KvIndex } from '@kvtier/kv-index';
import fc from 'fast-check';
import { expect, it, vi } from 'vitest';
import { PrefixMemory } from './prefix-memory.ts';

/** A chain of its own for each first number. */
const keys = (chain: number, length: number): Int32Array =>
  Int32Array.from({ length: 2 * length }, (_, i) => (i % 2 === 0 ? chain : (i >> 1) + 1));

const step = fc.record({
  chain: fc.integer({ min: 1, max: 12 }),
  length: fc.integer({ min: 1, max: 400 }),
  worker: fc.nat(3),
  leaves: fc.boolean(),
});

it('keeps its bound, whoever is sent what; what was sent last is known whole', () => {
  fc.assert(
    fc.property(fc.array(step, { minLength: 20, maxLength: 60 }), (steps) => {
      const maxBytes = 2 ** 20;
      const memory = new PrefixMemory({ maxBytes, maxBlocksPerWorker: 600 });
      const known = [
        new Map<string, true>(),
        new Map<string, true>(),
        new Map<string, true>(),
        new Map<string, true>(),
      ];
      for (const [now, { chain, length, worker, leaves }] of steps.entries()) {
        if (leaves && now % 7 === 0) {
          memory.left(worker);
          known[worker]!.clear();
        }
        memory.sent(keys(chain, length), worker);
        const blocks = known[worker]!;
        for (let i = length - 1; i >= 0; i--) {
          blocks.delete(`${chain} ${i}`);
          blocks.set(`${chain} ${i}`, true);
        }
        for (const block of blocks.keys()) {
          if (blocks.size <= 600) break;
          blocks.delete(block);
        }
        expect(memory.match(keys(chain, length), [worker])).toEqual([length]);
        expect([0, 1, 2, 3].map((one) => memory.size(one))).toEqual(known.map(({ size }) => size));
        expect(memory.bytes).toBeLessThanOrEqual(maxBytes);
      }
    }),
    { numRuns: 25 },
  );
});

it('forgets of the worker with most blocks when all together have more than fit', () => {
  const maxBytes = 2 ** 21;
  const maxBlocks = Math.floor(maxBytes / 2 / 112);
  const memory = new PrefixMemory({
    maxBytes,
    maxBlocksPerWorker: Number.POSITIVE_INFINITY,
  });
  memory.sent(keys(1, 100), 0);
  for (let chain = 2; chain < 600; chain++) memory.sent(keys(chain, 100), 1);
  expect([memory.size(0), memory.size(1)]).toEqual([100, maxBlocks - 100]);
  expect(memory.match(keys(1, 100), [0])).toEqual([100]);
  expect(memory.match(keys(599, 100), [1])).toEqual([100]);
  expect(memory.match(keys(2, 100), [1])).toEqual([0]);
  // A prompt of more blocks than fit: its beginning.
  memory.sent(keys(1000, maxBlocks + 50), 2);
  expect(memory.size(0) + memory.size(1) + memory.size(2)).toBe(maxBlocks);
  expect(memory.match(keys(1000, maxBlocks + 50), [2])).toEqual([memory.size(2)]);
  expect(memory.bytes).toBeLessThanOrEqual(maxBytes);
});

it('knows as many workers as there may be at a time, those included that leave', () => {
  const memory = new PrefixMemory({ maxBytes: 2 ** 25, maxBlocksPerWorker: 100 });
  const all = Array.from({ length: 2_048 }, (_, worker) => worker);
  memory.sent(keys(1, 10), 2_047);
  expect(memory.match(keys(1, 10), all)).toEqual(all.map((worker) => (worker === 2_047 ? 10 : 0)));
});

it('tells the index at once of all that it forgets', () => {
  const memory = new PrefixMemory({ maxBytes: 2 ** 25, maxBlocksPerWorker: 100 });
  memory.sent(keys(1, 100), 0);
  const removed = vi.spyOn(KvIndex.prototype, 'removed');
  memory.sent(keys(2, 90), 0);
  expect(removed.mock.calls.map(([, , gone]) => gone.length / 2)).toEqual([90]);
  removed.mockRestore();
  expect(memory.match(keys(1, 100), [0])).toEqual([10]);
});
