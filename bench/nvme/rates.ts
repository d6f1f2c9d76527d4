/**
 * One size of block through the disk tier in its default configuration, beside fio with I/O of that size on the same files, in
 * paired rounds; medians count. Steady state: all files have been filled before, so segments are recycled. Batches as the
 * store makes them; reads are verified and follow chains, or hop about at random (fio's are sequential), or are one single
 * request: one chain in one call with nothing else in flight.
 */
import { readdirSync } from 'node:fs';
import { join } from 'node:path';
import { KvError } from '@kvtier/errors';
import type { ArenaHandle } from '@kvtier/native';
import { type ArenaTier, DiskTier, type DiskTierOptions, type SlotBlock } from '@kvtier/tiers';
import { type BenchContext, type Figure, median, rate, time } from '../figures.ts';
import { Blocks, benchNamespace } from './blocks.ts';
import { fio, type Rate } from './fio.ts';

const rounds = 3;
const turnMs = 500;
const jobCounts = [1, 2, 4];
/** Of all segments. */
const fileBytes = 2 ** 31;
const capacityBytes = Math.ceil((fileBytes * 66) / 64);
/** Moved per slice; slices of it repeat until a turn's time is over. */
const sliceBytes = 512 << 20;
const chainBytes = 256 << 20;
/** As packages/store/src/limits.ts has them. */
const batchBytes = 16 << 20;
const batchesInFlight = 4;

/** Where the tier under test lives. */
export interface Place {
  readonly arena: ArenaHandle;
  readonly slots: ArenaTier;
  readonly log: DiskTierOptions['log'];
}

/** Move all of `blocks` in batches, a few at a time. */
async function inBatches(
  blocks: readonly SlotBlock[],
  payloadBytes: number,
  move: (batch: readonly SlotBlock[]) => Promise<void>,
): Promise<void> {
  const perBatch = Math.max(1, Math.floor(batchBytes / payloadBytes));
  let next = 0;
  const worker = async (): Promise<void> => {
    while (next < blocks.length) {
      const batch = blocks.slice(next, next + perBatch);
      next += perBatch;
      await move(batch);
    }
  };
  await Promise.all(Array.from({ length: batchesInFlight }, worker));
}

/** Slices for a turn's time; what `prepare` does is not counted. */
async function turn(
  payloadBytes: number,
  prepare: () => SlotBlock[],
  move: (blocks: SlotBlock[]) => Promise<void>,
): Promise<Rate> {
  let bytes = 0;
  let ms = 0;
  let cpuUs = 0;
  while (ms < turnMs) {
    const blocks = prepare();
    const before = process.cpuUsage();
    const startMs = performance.now();
    await move(blocks);
    ms += performance.now() - startMs;
    const { user, system } = process.cpuUsage(before);
    cpuUs += user + system;
    bytes += blocks.length * payloadBytes;
  }
  return { rate: bytes / ms / 1e6, cpu: cpuUs / bytes / 1e-3 };
}

async function tierRound(dir: string, blocks: Blocks, place: Place, note: (name: string, value: Rate) => void) {
  const tier = await DiskTier.open({ dir, capacityBytes, ...place });
  const { payloadBytes } = blocks;
  const write = async (part: readonly SlotBlock[]): Promise<void> => {
    const statuses = await tier.write(benchNamespace, part);
    if (statuses.some((status) => status !== 'stored')) throw new KvError('IO', `nvme: a write was ${statuses}`);
  };
  const read = (part: readonly SlotBlock[]): Promise<void> =>
    tier.read(benchNamespace, part, (_, status) => {
      if (status !== 'ready') throw new KvError('IO', `nvme: a read was ${status}`);
    });
  try {
    for (let bytes = 0; bytes < 1.25 * fileBytes; bytes += sliceBytes) {
      await inBatches(blocks.rename(), payloadBytes, write);
    }
    const all = (move: typeof read) => (slice: SlotBlock[]) => inBatches(slice, payloadBytes, move);
    const chainBlocks = Math.max(1, Math.floor(chainBytes / payloadBytes));
    note('write', await turn(payloadBytes, () => blocks.rename(), all(write)));
    note('read', await turn(payloadBytes, () => blocks.pick(tier, 'chain'), all(read)));
    note('read_random', await turn(payloadBytes, () => blocks.pick(tier, 'random'), all(read)));
    note('read_one_request', await turn(payloadBytes, () => blocks.pick(tier, 'chain', chainBlocks), read));
  } finally {
    await tier.close();
  }
}

export async function measureRates(
  context: BenchContext,
  place: Place,
  label: string,
  payloadBytes: number,
): Promise<Figure[]> {
  const dir = join(context.scratchDir, 'segments');
  const blocks = new Blocks(place.arena, place.slots, payloadBytes, Math.floor(sliceBytes / payloadBytes));
  const measured = new Map<string, Rate[]>();
  const note = (name: string, value: Rate): void => {
    measured.set(name, [...(measured.get(name) ?? []), value]);
  };
  for (let round = 0; round < rounds; round++) {
    await tierRound(dir, blocks, place, note);
    const files = readdirSync(dir).filter((name) => name.endsWith('.kvs'));
    const paths = files.map((name) => join(dir, name));
    for (const kind of ['write', 'read'] as const) {
      for (const jobs of jobCounts) note(`fio ${kind} ${jobs}`, await fio(paths, kind, payloadBytes, jobs, turnMs));
    }
  }
  for (const slot of blocks.slots) place.slots.free(slot);
  for (const [name, values] of measured) {
    context.log(`${label} ${name}: ${values.map((value) => value.rate.toFixed(2)).join(' ')} GB/s`);
  }
  const rateOf = (name: string): number => median(measured.get(name)!.map((each) => each.rate));
  const cpuOf = (name: string): number => median(measured.get(name)!.map((each) => each.cpu));
  // The best of medians, not the median of bests: a lucky moment of one of three is not what fio reaches.
  const best = (kind: string): string =>
    jobCounts.map((jobs) => `fio ${kind} ${jobs}`).reduce((a, b) => (rateOf(b) > rateOf(a) ? b : a));
  const figure = (name: string, kind: string): Figure =>
    rate(`${name}_${label}`, rateOf(name), 'GB/s', rateOf(best(kind)), 'fio best of 1,2,4 jobs');
  const cpu = (kind: string): Figure =>
    time(`cpu_${kind}_${label}`, cpuOf(kind), 's/GB', cpuOf(best(kind)), 'the same fio; it checks nothing');
  return [
    ...[figure('read', 'read'), figure('read_one_request', 'read'), figure('read_random', 'read'), cpu('read')],
    ...[figure('write', 'write'), cpu('write')],
  ];
}
