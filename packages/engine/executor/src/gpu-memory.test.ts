import { KvError } from '@kvtier/errors';
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { gpuBlockCount } from './gpu-memory.ts';

const gib = 2 ** 30;
const llama8b = { weightBytes: 15 * gib, stepBytes: 2 * gib, blockBytes: 2 * 2 ** 20 };

describe('the number of KV blocks of a GPU', () => {
  it('is what is left of nine tenths of an H200 beside an 8B model', () => {
    expect(gpuBlockCount({ totalBytes: 140 * gib, freeBytes: 139 * gib }, llama8b)).toBe((126 - 17) * 512);
  });

  it('follows the utilization', () => {
    expect(gpuBlockCount({ totalBytes: 80 * gib, freeBytes: 80 * gib }, llama8b, 0.5)).toBe((40 - 17) * 512);
    expect(gpuBlockCount({ totalBytes: 80 * gib, freeBytes: 80 * gib }, llama8b, 1)).toBe((80 - 17) * 512);
  });

  it('refuses a share that is not free, and says which one is', () => {
    const full = { totalBytes: 80 * gib, freeBytes: 60 * gib };
    expect(() => gpuBlockCount(full, llama8b)).toThrow(/60\.0 GiB of 80\.0 GiB are free; .* give 0\.75 or less/);
    expect(gpuBlockCount(full, llama8b, 0.75)).toBe((60 - 17) * 512);
  });

  it('refuses a share that the model fills, and says which one is enough', () => {
    const small = { totalBytes: 24 * gib, freeBytes: 24 * gib };
    expect(() => gpuBlockCount(small, llama8b, 0.7)).toThrow(/no room for KV blocks; give 0\.71 or more/);
    expect(gpuBlockCount(small, llama8b, 0.71)).toBeGreaterThanOrEqual(4);
    const tiny = { totalBytes: 16 * gib, freeBytes: 16 * gib };
    expect(() => gpuBlockCount(tiny, llama8b)).toThrow(/smaller model or a larger GPU/);
  });

  it.each([0, -0.1, 1.01, Number.NaN])('refuses a utilization of %s', (utilization) => {
    const memory = { totalBytes: 80 * gib, freeBytes: 80 * gib };
    expect(() => gpuBlockCount(memory, llama8b, utilization)).toThrow(KvError);
  });

  it('never takes more than its share, leaves less than a block of it, and what it proposes works', () => {
    const bytes = fc.integer({ min: 1, max: 200 * gib });
    fc.assert(
      fc.property(
        fc.record({ totalBytes: bytes, freeShare: fc.double({ min: 0, max: 1, noNaN: true }) }),
        fc.record({ weightBytes: bytes, stepBytes: bytes, blockBytes: fc.integer({ min: 256, max: 64 * 2 ** 20 }) }),
        fc.double({ min: 0.01, max: 1, noNaN: true }),
        ({ totalBytes, freeShare }, demand, utilization) => {
          const memory = { totalBytes, freeBytes: Math.floor(totalBytes * freeShare) };
          const shareBytes = Math.floor(totalBytes * utilization);
          const room = shareBytes - demand.weightBytes - demand.stepBytes;
          let blocks: number;
          try {
            blocks = gpuBlockCount(memory, demand, utilization);
          } catch (error) {
            expect((error as KvError).code).toBe('CONFIG');
            expect(memory.freeBytes < shareBytes || room < 4 * demand.blockBytes).toBe(true);
            return;
          }
          expect(blocks * demand.blockBytes).toBeLessThanOrEqual(room);
          expect((blocks + 1) * demand.blockBytes).toBeGreaterThan(room);
        },
      ),
    );
  });
});
