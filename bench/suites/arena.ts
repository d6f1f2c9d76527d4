/**
 * Export and import of KV blocks between the executor's pool and the shared arena, checksums included, against memcpy in
 * pieces of the same size on one or two threads, whichever is faster. Both sides are far larger than the caches. Rounds
 * alternate and the best of each counts, as in STREAM, so that other processes disturb neither.
 */
import { randomBytes } from 'node:crypto';
import { unlinkSync } from 'node:fs';
import { availableParallelism } from 'node:os';
import { type ArenaHandle, native } from '@kvtier/data-plane';
import { createExecutor, type Executor } from '@kvtier/executor';
import { binding } from '@kvtier/executor/testing';
import { resolveModel } from '@kvtier/model';
import { argumentsOf } from '../arguments.ts';
import { type Figure, rate, type Suite } from '../figures.ts';

const blocks = 2048; // 512 MiB of the 25m shape
const rounds = 9;

const suite: Suite = {
  name: 'arena',
  description: 'export and import of KV blocks, with checksums, against memcpy',
  async run({ args, log }): Promise<Figure[]> {
    argumentsOf('arena', args, {});
    const { dir } = await resolveModel('random:25m', (line, share) => log(`${line}: ${Math.round(100 * share)} %`));
    const threads = Math.min(2, availableParallelism());
    const executor = await createExecutor({
      modelDir: dir,
      blockTokens: 16,
      blockCount: blocks + 1,
      maxStepTokens: 16,
      maxStepSequences: 1,
    });
    const { blockBytes } = executor.kv;
    // A slot is a header of 256 bytes and the payload, in whole pages, as a cache node lays them out.
    const slotBytes = Math.ceil((256 + blockBytes) / 4096) * 4096;
    const bytes = 4096 + blocks * slotBytes;
    const path = `/dev/shm/kvtier-bench-${process.pid}-${randomBytes(4).toString('hex')}`;
    const arena = native.arenaCreate(path, bytes, threads);
    try {
      const number = attach(executor, path, bytes, arena);
      const ids = Int32Array.from({ length: blocks }, (_, i) => i + 1);
      const offsets = Float64Array.from({ length: blocks }, (_, i) => 4096 + i * slotBytes + 256);
      const total = blocks * blockBytes;
      const memcpy: number[] = [];
      const exports: number[] = [];
      const imports: number[] = [];
      for (let round = 0; round < rounds; round++) {
        for (const count of [1, threads]) memcpy.push((await binding().memcpyRate(blockBytes, total, count, 1)) / 1e9);
        let start = performance.now();
        const checksums = await executor.exportBlocks(number, ids, offsets);
        exports.push(total / (performance.now() - start) / 1e6);
        start = performance.now();
        const good = await executor.importBlocks(number, ids, offsets, checksums);
        imports.push(total / (performance.now() - start) / 1e6);
        if (good.some((flag) => flag !== 1)) throw new Error('arena bench: a block did not come back as it went');
      }
      const limit = Math.max(...memcpy);
      const name = `memcpy, ${blockBytes / 1024} KiB pieces, best of 1 and ${threads} threads`;
      log(
        `${blocks} blocks of ${blockBytes} bytes; export ${exports.map((x) => x.toFixed(1))}; memcpy ${memcpy.map((x) => x.toFixed(1))}`,
      );
      return [
        rate('export', Math.max(...exports), 'GB/s', limit, name),
        rate('import', Math.max(...imports), 'GB/s', limit, name),
      ];
    } finally {
      await executor.close();
      native.arenaClose(arena);
    }
  },
};

export default suite;

/** The mappings are enough: the name goes at once, and nothing is left however this process ends. */
function attach(executor: Executor, path: string, bytes: number, arena: ArenaHandle): number {
  try {
    return executor.attachArena(path, bytes, native.arenaId(arena));
  } finally {
    unlinkSync(path);
  }
}
