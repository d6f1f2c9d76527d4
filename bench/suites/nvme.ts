/**
 * The disk tier in its default configuration: payload rates at several sizes of block and CPU seconds per GB beside fio's on the
 * same files, and the restart of a million blocks. `npm run bench -- nvme 4m restart` measures only these. How: bench/nvme.
 */
import { unlinkSync } from 'node:fs';
import { rm } from 'node:fs/promises';
import { join } from 'node:path';
import { native } from '@kvtier/data-plane';
import { ArenaTier } from '@kvtier/tiers';
import { argumentsOf } from '../arguments.ts';
import type { BenchContext, Figure, Suite } from '../figures.ts';
import { measureRates, type Place } from '../nvme/rates.ts';
import { measureRestart } from '../nvme/restart.ts';

const arenaBytes = 640 << 20;
/** Chosen on the command line by their labels; `restart` is one of them. */
const sizes = [
  { label: '64k', payloadBytes: 64 << 10 },
  { label: '1m', payloadBytes: 1 << 20 },
  { label: '4m', payloadBytes: 4 << 20 },
  { label: '32m', payloadBytes: 32 << 20 },
];

export const labels = sizes.map(({ label }) => label);

async function runNvme(context: BenchContext): Promise<Figure[]> {
  const { words } = argumentsOf('nvme', context.args, { words: [...labels, 'restart'] });
  const isChosen = (part: string): boolean => words.length === 0 || words.includes(part);
  const arenaPath = `/dev/shm/kvtier-bench-nvme-${process.pid}`;
  const arena = native.arenaCreate(arenaPath, arenaBytes, 2);
  unlinkSync(arenaPath); // the mapping is enough
  const slots = new ArenaTier({ arena, arenaBytes, nowUs: () => performance.now() * 1000 });
  // fio leaves nothing that the tier could recover, and the tier says so each time: only errors are news.
  const error = (fields: object, message: string): void => context.log(`${message} ${JSON.stringify(fields)}`);
  const place: Place = { arena, slots, log: { info: () => {}, warn: () => {}, error } };
  try {
    const figures: Figure[] = [];
    for (const { label, payloadBytes } of sizes.filter((each) => isChosen(each.label))) {
      figures.push(...(await measureRates(context, place, label, payloadBytes)));
    }
    await rm(join(context.scratchDir, 'segments'), { recursive: true, force: true });
    if (isChosen('restart')) figures.push(...(await measureRestart(context, place)));
    return figures;
  } finally {
    await slots.close();
    native.arenaClose(arena);
  }
}

const suite: Suite = {
  name: 'nvme',
  description: 'the disk tier: payload rates and CPU beside fio on the same files, restart of a million blocks',
  needs: ['fio'],
  run: runNvme,
};
export default suite;
