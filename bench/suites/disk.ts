/**
 * Payload rates of the disk tier against what fio gets out of the same file system with I/O of the block's size, in the same
 * run. Default configuration, steady state: every file has been filled before, so segments are recycled. Batches as the
 * store makes them. Reads follow chains (`read_*`) or hop about at random (`read_random_*`), all verified. Rounds are paired
 * and interleaved with fio's; figures are medians.
 */
import { execFile } from 'node:child_process';
import { createHash } from 'node:crypto';
import { unlinkSync } from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { KvError } from '@kvtier/errors';
import { encodeHeader, type HashKey, headerBytes, namespaceFromDigest } from '@kvtier/identity';
import { native } from '@kvtier/native';
import { ArenaTier, DiskTier, type SlotBlock } from '@kvtier/tiers';
import { type BenchContext, type Figure, median, rate, type Suite } from '../figures.ts';

const rounds = 5;
const turnMs = 700;
const jobCounts = [1, 2, 4];
/** Of all segments, and of fio's file. */
const fileBytes = 2 ** 31;
const arenaBytes = 640 << 20;
/** Moved per slice; slices of it repeat until a turn's time is over. */
const sliceBytes = 256 << 20;
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

/** What fio reaches with so many jobs, GB/s. */
async function fio(path: string, kind: 'read' | 'write', ioBytes: number, jobs: number): Promise<number> {
  const share = fileBytes / jobs;
  const { stdout } = await run('fio', [
    ...['--name=limit', `--filename=${path}`, `--rw=${kind}`, `--bs=${ioBytes}`, '--direct=1', '--ioengine=io_uring'],
    ...['--iodepth=32', `--numjobs=${jobs}`, `--size=${share}`, `--offset_increment=${share}`, '--group_reporting'],
    ...['--time_based', `--runtime=${turnMs}ms`, '--output-format=json', '--overwrite=1', '--fallocate=none'],
  ]).catch((error: Error) => {
    throw new KvError('SETUP', `fio: does not run here (${error.message}); install it: apt-get install fio`);
  });
  const result = JSON.parse(stdout) as { jobs: { read: { bw_bytes: number }; write: { bw_bytes: number } }[] };
  return result.jobs[0]![kind].bw_bytes / 1e9;
}

/** Slots of one size, and the names of what was written last, oldest first. */
class Blocks {
  readonly written: HashKey[] = [];
  readonly #arena: Parameters<typeof native.arenaWrite>[0];
  readonly #payloadBytes: number;
  readonly #checksum: bigint;
  readonly slots: number[];
  #count = 0;

  constructor(arena: Parameters<typeof native.arenaWrite>[0], tier: ArenaTier, payloadBytes: number) {
    this.#arena = arena;
    this.#payloadBytes = payloadBytes;
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
      const name = `${this.#payloadBytes}.${this.#count++}`;
      const hash = createHash('sha256').update(name).digest().toString('latin1') as HashKey;
      const header = encodeHeader({
        ...{ namespace: namespace.digest, hash, parent: null, tokenCount: 16 },
        ...{ payloadBytes: this.#payloadBytes, payloadChecksum: this.#checksum },
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

async function runDisk(context: BenchContext): Promise<Figure[]> {
  const arenaPath = `/dev/shm/kvtier-bench-disk-${process.pid}`;
  const arena = native.arenaCreate(arenaPath, arenaBytes, 2);

  unlinkSync(arenaPath); // the mapping is enough
  const nowUs = (): number => performance.now() * 1000;
  const log = {
    info: (fields: object, message: string) => context.log(`${message} ${JSON.stringify(fields)}`),
    warn: (fields: object, message: string) => context.log(`${message} ${JSON.stringify(fields)}`),
    error: (fields: object, message: string) => context.log(`${message} ${JSON.stringify(fields)}`),
  };
  const slots = new ArenaTier({ arena, arenaBytes, nowUs });
  const capacityBytes = Math.ceil((fileBytes * 66) / 64);
  const tier = await DiskTier.open({ dir: join(context.scratchDir, 'segments'), capacityBytes, arena, slots, log });

  const fioFile = join(context.scratchDir, 'fio');
  await native.prepareFile(fioFile, fileBytes);
  const figures: Figure[] = [];
  try {
    for (const { label, payloadBytes } of sizes) {
      const blocks = new Blocks(arena, slots, payloadBytes);
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
      // Steady state: all segments exist and hold blocks of this size.
      for (let bytes = 0; bytes < 1.25 * fileBytes; bytes += sliceBytes) await write();
      const measured = new Map<string, number[]>();
      const note = (name: string, value: number): void => {
        measured.set(name, [...(measured.get(name) ?? []), value]);
      };
      for (let round = 0; round < rounds; round++) {
        for (const kind of ['write', 'read'] as const) {
          for (const jobs of jobCounts) note(`fio ${kind} ${jobs}`, await fio(fioFile, kind, payloadBytes, jobs));
          if (kind === 'write') note('write', await repeat(payloadBytes, write));
          else {
            note('read', await repeat(payloadBytes, () => read('chain')));
            note('read_random', await repeat(payloadBytes, () => read('random')));
          }
        }
      }
      for (const [name, values] of measured) {
        context.log(`${label} ${name}: ${values.map((value) => value.toFixed(2)).join(' ')} GB/s`);
      }
      const limitName = 'fio best of 1,2,4 jobs';
      const of = (name: string): number => median(measured.get(name)!);
      // The best of medians, not the median of bests: a lucky moment of one of three is not what fio reaches.
      const limit = (kind: string): number => Math.max(...jobCounts.map((jobs) => of(`fio ${kind} ${jobs}`)));
      figures.push(rate(`read_${label}`, of('read'), 'GB/s', limit('read'), limitName));
      figures.push(rate(`read_random_${label}`, of('read_random'), 'GB/s', limit('read'), limitName));
      figures.push(rate(`write_${label}`, of('write'), 'GB/s', limit('write'), limitName));
      for (const slot of blocks.slots) slots.free(slot);
    }
  } finally {
    await tier.close();
    await slots.close();
    native.arenaClose(arena);
  }
  return figures;
}

const suite: Suite = {
  name: 'disk',
  description: 'payload read and written through the disk tier, against fio on the same file system',
  needs: ['fio'],
  run: runDisk,
};
export default suite;
