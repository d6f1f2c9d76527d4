/**
 * Payload rates of the disk tier against what fio gets out of the same files with I/O of the block's size, in the same run.
 * The same files: where a file lies on a virtual disk changes its rate by half, so fio reads and overwrites the tier's own
 * segment files, each round, once the tier is closed. Default configuration, steady state: every file has been filled
 * before, so segments are recycled. Batches as the store makes them. Reads follow chains (`read_*`) or hop about at random
 * (`read_random_*`), all verified; fio's are sequential. Figures are medians of paired rounds.
 */
import { execFile } from 'node:child_process';
import { createHash } from 'node:crypto';
import { readdirSync, unlinkSync } from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { KvError } from '@kvtier/errors';
import { encodeHeader, type HashKey, headerBytes, namespaceFromDigest } from '@kvtier/identity';
import { type ArenaHandle, native } from '@kvtier/native';
import { ArenaTier, DiskTier, type DiskTierOptions, type SlotBlock } from '@kvtier/tiers';
import { type BenchContext, type Figure, median, rate, type Suite } from '../figures.ts';

const rounds = 5;
const turnMs = 700;
const jobCounts = [1, 2, 4];
/** Of all segments. */
const fileBytes = 2 ** 31;
const arenaBytes = 640 << 20;
/** Moved per slice; slices of it repeat until a turn's time is over. */
const sliceBytes = 512 << 20;
/** As packages/store/src/limits.ts has them. */
const batchBytes = 16 << 20;
const batchesInFlight = 4;
const sizes = [
  { label: '64k', payloadBytes: 64 << 10 },
  { label: '1m', payloadBytes: 1 << 20 },
  { label: '4m', payloadBytes: 4 << 20 },
];
const namespace = namespaceFromDigest(createHash('sha256').update('bench disk').digest());
const run = promisify(execFile);

/** What fio reaches on these files with so many jobs, each with its share of them, GB/s. */
async function fio(files: readonly string[], kind: 'read' | 'write', ioBytes: number, jobs: number): Promise<number> {
  const perJob = Math.ceil(files.length / jobs);
  const shares = Array.from({ length: jobs }, (_, job) => files.slice(job * perJob, (job + 1) * perJob));
  const { stdout } = await run('fio', [
    ...[`--rw=${kind}`, `--bs=${ioBytes}`, '--direct=1', '--ioengine=io_uring', '--iodepth=32', '--group_reporting'],
    ...['--time_based', `--runtime=${turnMs}ms`, '--output-format=json', '--overwrite=1', '--fallocate=none'],
    ...['--file_service_type=sequential', '--thread'],
    ...shares.flatMap((share, job) => [`--name=job${job}`, `--filename=${share.join(':')}`]),
  ]).catch((error: Error) => {
    throw new KvError('SETUP', `fio: does not run here (${error.message}); install it: apt-get install fio`);
  });
  const result = JSON.parse(stdout) as { jobs: { read: { bw_bytes: number }; write: { bw_bytes: number } }[] };
  return result.jobs[0]![kind].bw_bytes / 1e9;
}

/** Where the tier under test lives. */
interface Place {
  readonly arena: ArenaHandle;
  readonly slots: ArenaTier;
  readonly log: DiskTierOptions['log'];
}

type Note = (name: string, value: number) => void;

/** Slots of one size, and the names of what was written last, oldest first. */
class Blocks {
  readonly written: HashKey[] = [];
  readonly #arena: ArenaHandle;
  readonly payloadBytes: number;
  readonly #checksum: bigint;
  readonly slots: number[];
  #count = 0;

  constructor(arena: ArenaHandle, tier: ArenaTier, payloadBytes: number) {
    this.#arena = arena;
    this.payloadBytes = payloadBytes;
    const payload = Buffer.alloc(payloadBytes);
    for (let at = 0; at < payloadBytes; at += 4) payload.writeUInt32LE(Math.imul(at, 2_654_435_761) >>> 0, at);
    this.#checksum = native.xxh3_64(payload);
    const slotCount = Math.floor(sliceBytes / payloadBytes);
    this.slots = Array.from({ length: slotCount }, () => tier.allocate(namespace, payloadBytes)!);
    for (const slot of this.slots) native.arenaWrite(arena, slot + headerBytes, payload);
  }

  /** New names for what is in the slots: what an engine's commit does. */
  rename(): SlotBlock[] {
    const blocks = this.slots.map((slot): SlotBlock => {
      const name = `${this.payloadBytes}.${this.#count++}`;
      const hash = createHash('sha256').update(name).digest().toString('latin1') as HashKey;
      const header = encodeHeader({
        ...{ namespace: namespace.digest, hash, parent: null, tokenCount: 16 },
        ...{ payloadBytes: this.payloadBytes, payloadChecksum: this.#checksum },
      });
      native.arenaWrite(this.#arena, slot, header);
      return { hash, slot };
    });
    this.written.push(...blocks.map(({ hash }) => hash));
    return blocks;
  }

  /** A slice of what the tier holds: a chain that begins anywhere, or blocks from everywhere. */
  pick(tier: DiskTier, order: 'chain' | 'random'): SlotBlock[] {
    const held = this.written.filter((hash) => tier.lookup(namespace, [hash]) === 1);
    const first = Math.floor(Math.random() * Math.max(1, held.length - this.slots.length));
    return this.slots.map((slot, i) => {
      const at = order === 'chain' ? first + i : Math.floor(Math.random() * held.length);
      return { hash: held[at % held.length]!, slot };
    });
  }
}

/** Milliseconds to move all of `blocks` in batches, a few at a time. */
async function timed(
  blocks: readonly SlotBlock[],
  payloadBytes: number,
  move: (batch: readonly SlotBlock[]) => Promise<void>,
): Promise<number> {
  const perBatch = Math.max(1, Math.floor(batchBytes / payloadBytes));
  let next = 0;
  const worker = async (): Promise<void> => {
    while (next < blocks.length) {
      const batch = blocks.slice(next, next + perBatch);
      next += perBatch;
      await move(batch);
    }
  };
  const startMs = performance.now();
  await Promise.all(Array.from({ length: batchesInFlight }, worker));
  return performance.now() - startMs;
}

async function repeat(payloadBytes: number, slice: () => Promise<{ blocks: number; ms: number }>): Promise<number> {
  let blocks = 0;
  let ms = 0;
  while (ms < turnMs) {
    const done = await slice();
    blocks += done.blocks;
    ms += done.ms;
  }
  return (blocks * payloadBytes) / ms / 1e6;
}

/** One round of the tier: opened, filled, and measured. */
async function tierRound(dir: string, blocks: Blocks, place: Place, note: Note): Promise<void> {
  const { arena, slots, log } = place;
  const capacityBytes = Math.ceil((fileBytes * 66) / 64);
  const tier = await DiskTier.open({ dir, capacityBytes, arena, slots, log });
  const { payloadBytes } = blocks;
  const write = async (): Promise<{ blocks: number; ms: number }> => {
    const batch = blocks.rename();
    const ms = await timed(batch, payloadBytes, async (part) => {
      const statuses = await tier.write(namespace, part);
      if (statuses.some((status) => status !== 'stored')) throw new KvError('IO', `disk: a write was ${statuses}`);
    });
    return { blocks: batch.length, ms };
  };
  const read = async (order: 'chain' | 'random'): Promise<{ blocks: number; ms: number }> => {
    const batch = blocks.pick(tier, order);
    const ms = await timed(batch, payloadBytes, (part) =>
      tier.read(namespace, part, (_, status) => {
        if (status !== 'ready') throw new KvError('IO', `disk: a read was ${status}`);
      }),
    );
    return { blocks: batch.length, ms };
  };
  try {
    // Steady state: all segments exist and hold blocks of this size.
    for (let bytes = 0; bytes < 1.25 * fileBytes; bytes += sliceBytes) await write();
    note('write', await repeat(payloadBytes, write));
    note('read', await repeat(payloadBytes, () => read('chain')));
    note('read_random', await repeat(payloadBytes, () => read('random')));
  } finally {
    await tier.close();
  }
}

async function measure(context: BenchContext, place: Place, label: string, payloadBytes: number): Promise<Figure[]> {
  const dir = join(context.scratchDir, 'segments');
  const blocks = new Blocks(place.arena, place.slots, payloadBytes);
  const measured = new Map<string, number[]>();
  const note: Note = (name, value) => measured.set(name, [...(measured.get(name) ?? []), value]);
  for (let round = 0; round < rounds; round++) {
    await tierRound(dir, blocks, place, note);
    const files = readdirSync(dir)
      .filter((name) => name.endsWith('.kvs'))
      .map((name) => join(dir, name));
    for (const kind of ['write', 'read'] as const) {
      for (const jobs of jobCounts) note(`fio ${kind} ${jobs}`, await fio(files, kind, payloadBytes, jobs));
    }
  }
  for (const slot of blocks.slots) place.slots.free(slot);
  for (const [name, values] of measured) {
    context.log(`${label} ${name}: ${values.map((value) => value.toFixed(2)).join(' ')} GB/s`);
  }
  const of = (name: string): number => median(measured.get(name)!);
  // The best of medians, not the median of bests: a lucky moment of one of three is not what fio reaches.
  const limit = (kind: string): number => Math.max(...jobCounts.map((jobs) => of(`fio ${kind} ${jobs}`)));
  const figure = (name: string, kind: string): Figure =>
    rate(`${name}_${label}`, of(name), 'GB/s', limit(kind), 'fio best of 1,2,4 jobs');
  return [figure('read', 'read'), figure('read_random', 'read'), figure('write', 'write')];
}

async function runDisk(context: BenchContext): Promise<Figure[]> {
  const arenaPath = `/dev/shm/kvtier-bench-disk-${process.pid}`;
  const arena = native.arenaCreate(arenaPath, arenaBytes, 2);
  unlinkSync(arenaPath); // the mapping is enough
  const slots = new ArenaTier({ arena, arenaBytes, nowUs: () => performance.now() * 1000 });
  // fio leaves nothing that the tier could recover, and the tier says so each time: only errors are news.
  const error = (fields: object, message: string): void => context.log(`${message} ${JSON.stringify(fields)}`);
  const place: Place = { arena, slots, log: { info: () => {}, warn: () => {}, error } };
  try {
    const figures: Figure[] = [];
    for (const { label, payloadBytes } of sizes) figures.push(...(await measure(context, place, label, payloadBytes)));
    return figures;
  } finally {
    await slots.close();
    native.arenaClose(arena);
  }
}

const suite: Suite = {
  name: 'disk',
  description: 'payload read and written through the disk tier, against fio on the same file system',
  needs: ['fio'],
  run: runDisk,
};
export default suite;
