import { KvError } from '@kvtier/errors';
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { gpuBlockCount, gpuStepSizes, mostPoolLoss } from './gpu-memory.ts';

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
    expect(() => gpuBlockCount(full, llama8b)).toThrow(
      'gpu.memoryUtilization (--gpu-memory-utilization) 0.9: 60.0 GiB of 80.0 GiB are free; ' +
        'end what else uses this GPU, or give 0.75 or less',
    );
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

describe('the sizes of steps that a GPU has room for', () => {
  const sizes = [512, 1024, 2048, 4096, 8192];
  /** An eighth of a MiB a token. */
  const demand = (tokens: number) => ({ ...llama8b, stepBytes: tokens * (gib / 8192) });

  it('are all of them where the pool hardly notices', () => {
    expect(gpuStepSizes({ totalBytes: 80 * gib, freeBytes: 80 * gib }, demand, 0.9, sizes)).toEqual(
      sizes.map((tokens) => ({ tokens, blocks: (72 - 15) * 512 - tokens / 16 })),
    );
  });

  it('end where the pool would lose more than a tenth', () => {
    // 5.1 GiB are left beside the weights: 5.0375 beside 512 tokens, 4.6 beside 4,096, 4.1 beside 8,192.
    const memory = { totalBytes: 20.1 * gib, freeBytes: 20.1 * gib };
    expect(gpuStepSizes(memory, demand, 1, sizes).map(({ tokens }) => tokens)).toEqual([512, 1024, 2048, 4096]);
  });

  it('are the first where only that fits, and a clear refusal where not even that does', () => {
    const memory = { totalBytes: 15.071 * gib, freeBytes: 15.071 * gib };
    expect(gpuStepSizes(memory, demand, 1, sizes)).toEqual([{ tokens: 512, blocks: 4 }]);
    const none = { totalBytes: 15.07 * gib, freeBytes: 15.07 * gib };
    expect(() => gpuStepSizes(none, demand, 1, sizes)).toThrow(/no room for KV blocks/);
  });

  it('ascend, cost the pool a tenth at most, and have the blocks that such a step alone would have', () => {
    const bytes = fc.integer({ min: 1, max: 200 * gib });
    fc.assert(
      fc.property(
        bytes,
        fc.record({ weightBytes: bytes, perToken: fc.integer({ min: 1, max: 4 * 2 ** 20 }) }),
        fc.integer({ min: 256, max: 64 * 2 ** 20 }),
        (totalBytes, { weightBytes, perToken }, blockBytes) => {
          const memory = { totalBytes, freeBytes: totalBytes };
          const of = (tokens: number) => ({ weightBytes, stepBytes: tokens * perToken, blockBytes });
          const alone = sizes.map((tokens) => {
            try {
              return { tokens, blocks: gpuBlockCount(memory, of(tokens), 0.9) };
            } catch {
              return { tokens, blocks: 0 };
            }
          });
          const first = alone[0]!.blocks;
          if (first === 0) return;
          const enough = alone.filter(({ blocks }) => blocks > 0 && blocks >= first * (1 - mostPoolLoss));
          expect(gpuStepSizes(memory, of, 0.9, sizes)).toEqual(enough);
        },
      ),
    );
  });
});
