/**
 * The restart of a tier of 4 GiB with a million blocks of 4 KiB, written through the tier itself. Each restart is a fresh
 * process, cold code and all; the median of them counts, for a million blocks.
 */
import { execFile } from 'node:child_process';
import { rm } from 'node:fs/promises';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { KvError } from '@kvtier/errors';
import { headerBytes } from '@kvtier/identity';
import { DiskTier } from '@kvtier/tiers';
import { type BenchContext, type Figure, median, time } from '../figures.ts';
import { Blocks, benchNamespace } from './blocks.ts';
import type { Place } from './rates.ts';

const blockCount = 1_000_000;
const payloadBytes = 4096 - headerBytes;
/** Room for the footers, too: nothing is evicted. */
const capacityBytes = 4.4 * 2 ** 30;
const batchBlocks = 4096;
const restarts = 3;
const script = fileURLToPath(new URL('../scripts/disk-open.ts', import.meta.url));
const run = promisify(execFile);

export async function measureRestart(context: BenchContext, { arena, slots, log }: Place): Promise<Figure[]> {
  const dir = join(context.scratchDir, 'restart');
  const tier = await DiskTier.open({ dir, capacityBytes, arena, slots, log });
  const blocks = new Blocks(arena, slots, payloadBytes, 2 * batchBlocks);
  try {
    let left = blockCount;
    const writer = async (first: number): Promise<void> => {
      while (left > 0) {
        const count = Math.min(left, batchBlocks);
        left -= count;
        const statuses = await tier.write(benchNamespace, blocks.rename(first, count));
        if (statuses.some((status) => status !== 'stored')) throw new KvError('IO', 'nvme: a write was not stored');
      }
    };
    await Promise.all([writer(0), writer(batchBlocks)]);
    await tier.close();
    const times: number[] = [];
    for (let i = 0; i < restarts; i++) {
      const { stdout } = await run(process.execPath, ['--import', 'tsx', script, dir, String(capacityBytes)]);
      const { ms, blocks: count } = JSON.parse(stdout) as { ms: number; blocks: number };
      if (count !== blockCount) throw new KvError('IO', `nvme: ${count} blocks after the restart, not ${blockCount}`);
      times.push(ms);
    }
    context.log(`restart of ${blockCount} blocks: ${times.map((ms) => ms.toFixed(0)).join(' ')} ms`);
    return [time('restart_1m_blocks', median(times), 'ms', 1000, 'required: 1 s a million blocks')];
  } finally {
    await tier.close();
    for (const slot of blocks.slots) slots.free(slot);
    await rm(dir, { recursive: true, force: true });
  }
}
