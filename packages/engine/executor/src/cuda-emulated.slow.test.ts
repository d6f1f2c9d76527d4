/** The CUDA backend, its kernels on the CPU: everything but its speed. On a GPU: cuda.gpu.slow.test.ts. */
import { rm } from 'node:fs/promises';
import { describe, it, vi } from 'vitest';
import type { Executor } from './index.ts';
import { describeGpuBackend, isMapped, open } from './testing/backend-suite.ts';
import { makeSparseArena } from './testing/sparse-arena.ts';

describeGpuBackend('cuda-emulated', { prompts: 6, bf16Families: 2 });

describe('an arena whose pinning takes long', () => {
  /** 4096 pieces of a GiB at 100 ms, on eight threads at most: 51 s. The file is sparse, and nobody touches it. */
  const bytes = 4096 * 2 ** 30;
  const pieceMs = '100';
  const id = 0x1234_5678_9abc_def0n;

  async function attached(run: (path: string, executor: Executor, arena: number) => Promise<void>) {
    const path = `/dev/shm/kvtier-test-slow-pins-${process.pid}`;
    process.env.KVTIER_EMULATED_PIN_MS = pieceMs;
    try {
      makeSparseArena(path, bytes, id);
      const executor = await open('cuda-emulated', 'llama');
      await run(path, executor, executor.attachArena(path, bytes, id));
      await vi.waitUntil(async () => !(await isMapped(path)), { timeout: 20_000 });
    } finally {
      delete process.env.KVTIER_EMULATED_PIN_MS;
      await rm(path, { force: true });
    }
  }

  it('is let go at once when it is left', { timeout: 30_000 }, async () => {
    await attached(async (_, executor, arena) => executor.detachArena(arena));
  });

  it('does not hold up the end of the executor', { timeout: 30_000 }, async () => {
    await attached(async (_, executor) => executor.close());
  });
});
