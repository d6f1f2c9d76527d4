/**
 * One size of block through the disk tier in its default configuration, beside fio on the same files, with I/O of that size and of 1 MiB
 * (the tier gathers small blocks, and cuts large ones): the best of them is the limit, and the log says where the tier is above it. The
 * rate of a virtual disk wanders by half within a minute, so turns of the tier and of fio alternate, a few hundred milliseconds
 * each; medians count. Steady state: all files have been filled before, so segments are recycled. Batches as the store makes
 * them; reads are verified and follow chains, or hop about at random (fio's are sequential), or are one single request: one
 * chain in one call with nothing else in flight.
 */
import { readdirSync } from 'node:fs';
import { join } from 'node:path';
import type { ArenaHandle } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';
import { type ArenaTier, DiskTier, type DiskTierOptions, type SlotBlock } from '@kvtier/tiers';
import { type BenchContext, type Figure, median, rate, time } from '../figures.ts';
import { Blocks, benchNamespace } from './blocks.ts';
import { fio, type Rate } from './fio.ts';

const rounds = 4;
const turnMs = 400;
const jobCounts = [1, 2, 4];
/** Large enough for any device's bandwidth, small enough to be many at a time. */
const bandwidthIo = { label: '1m', bytes: 1 << 20 };
/** Of all segments. */
const fileBytes = 2 ** 31;
const capacityBytes = Math.ceil((fileBytes * 66) / 64);
/** Moved per slice; slices of it repeat until a turn's time is over. */
const sliceBytes = 512 << 20;
const chainBytes = 256 << 20;
/** As packages/store/placement/src/limits.ts has them. */
const batchBytes = 16 << 20;
const batchesInFlight = 4;

/** Above so many times what fio has, fio was not at the device's limit. */
const mostAboveFio = 1.1;

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

/** Of fio's I/O, by name. */
const fioSizes = (payloadBytes: number): ReadonlyMap<string, number> =>
  payloadBytes === bandwidthIo.bytes
    ? new Map([[bandwidthIo.label, bandwidthIo.bytes]])
    : new Map([
        ['block', payloadBytes],
        [bandwidthIo.label, bandwidthIo.bytes],
      ]);

const fioName = (kind: 'read' | 'write', io: string, jobs: number): string => `fio ${kind} ${io} ${jobs}`;

type Note = (name: string, value: Rate) => void;

/** Turns of the tier and of fio on the segments in `dir`: reads beside the open tier, writes (fio's destroy what it holds) after it is closed. */
async function alternate(dir: string, blocks: Blocks, place: Place, note: Note): Promise<void> {
  const { payloadBytes } = blocks;
  const open = (): Promise<DiskTier> => DiskTier.open({ dir, capacityBytes, ...place });
  const segments = (): string[] =>
    readdirSync(dir)
      .filter((name) => name.endsWith('.kvs'))
      .map((name) => join(dir, name));
  const write = (tier: DiskTier) => async (part: readonly SlotBlock[]) => {
    const statuses = await tier.write(benchNamespace, part);
    if (statuses.some((status) => status !== 'stored')) throw new KvError('IO', `nvme: a write was ${statuses}`);
  };
  const read = (tier: DiskTier) => (part: readonly SlotBlock[]) =>
    tier.read(benchNamespace, part, (_, status) => {
      if (status !== 'ready') throw new KvError('IO', `nvme: a read was ${status}`);
    });
  const all = (move: ReturnType<typeof read>) => (slice: SlotBlock[]) => inBatches(slice, payloadBytes, move);
  const beside = async (kind: 'read' | 'write', jobs: number): Promise<void> => {
    for (const [io, bytes] of fioSizes(payloadBytes))
      note(fioName(kind, io, jobs), await fio(segments(), kind, bytes, jobs, turnMs));
  };
  const chainBlocks = Math.max(1, Math.floor(chainBytes / payloadBytes));

  let tier = await open();
  try {
    for (let bytes = 0; bytes < 1.25 * fileBytes; bytes += sliceBytes) {
      await inBatches(blocks.rename(), payloadBytes, write(tier));
    }
    for (const jobs of jobCounts) {
      note('read', await turn(payloadBytes, () => blocks.pick(tier, 'chain'), all(read(tier))));
      await beside('read', jobs);
      note('read_random', await turn(payloadBytes, () => blocks.pick(tier, 'random'), all(read(tier))));
      note('read_one_request', await turn(payloadBytes, () => blocks.pick(tier, 'chain', chainBlocks), read(tier)));
    }
    for (const jobs of jobCounts) {
      note('write', await turn(payloadBytes, () => blocks.rename(), all(write(tier))));
      await tier.close();
      await beside('write', jobs);
      tier = await open();
    }
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
  for (let round = 0; round < rounds; round++) await alternate(dir, blocks, place, note);
  for (const slot of blocks.slots) place.slots.free(slot);
  for (const [name, values] of measured) {
    context.log(`${label} ${name}: ${values.map((value) => value.rate.toFixed(2)).join(' ')} GB/s`);
  }
  return figuresOf(label, payloadBytes, measured, context.log);
}

/** Of what was measured, by name. */
export function figuresOf(
  label: string,
  payloadBytes: number,
  measured: ReadonlyMap<string, readonly Rate[]>,
  log: (line: string) => void,
): Figure[] {
  const rateOf = (name: string): number => median(measured.get(name)!.map((each) => each.rate));
  const cpuOf = (name: string): number => median(measured.get(name)!.map((each) => each.cpu));
  // The best of medians, not the median of bests: a lucky moment of one of three is not what fio reaches.
  const sizes = [...fioSizes(payloadBytes).keys()];
  const best = (kind: 'read' | 'write', of = sizes): string =>
    of
      .flatMap((io) => jobCounts.map((jobs) => fioName(kind, io, jobs)))
      .reduce((a, b) => (rateOf(b) > rateOf(a) ? b : a));
  const limitName = `fio best of ${jobCounts} jobs, I/O of the block's size and of 1 MiB`;
  const figure = (name: string, kind: 'read' | 'write'): Figure => {
    const one = rate(`${name}_${label}`, rateOf(name), 'GB/s', rateOf(best(kind)), limitName);
    if (one.ratio > mostAboveFio)
      log(
        `${one.name}: limit not reached by fio: ${one.value.toFixed(2)} beside ${one.limit.toFixed(2)} GB/s (${best(kind)})`,
      );
    return one;
  };
  // Of I/O of the block's own size: what a request costs is most of it.
  const cpu = (kind: 'read' | 'write'): Figure => {
    const limit = cpuOf(best(kind, sizes.slice(0, 1)));
    return time(`cpu_${kind}_${label}`, cpuOf(kind), 's/GB', limit, "fio, I/O of the block's size; it checks nothing");
  };
  return [
    ...[figure('read', 'read'), figure('read_one_request', 'read'), figure('read_random', 'read'), cpu('read')],
    ...[figure('write', 'write'), cpu('write')],
  ];
}
