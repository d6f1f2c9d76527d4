/**
 * The tiers below the arena, as the configuration asks for them, fastest first: disk, peer, redis, s3. What is not asked for is not
 * even imported: a node is to start, and start again, at once.
 */
import path from 'node:path';
import type { ArenaHandle } from '@kvtier/data-plane';
import type { TierPlan } from '@kvtier/placement';
import type { Clock, Log } from '@kvtier/runtime';
import {
  ArenaMemory,
  type ArenaTier,
  type CodecName,
  CodecTier,
  DiskTier,
  type DiskTierOptions,
  type RedisSettings,
  type S3Settings,
  type Tier,
} from '@kvtier/tiers';
import { openOrLater } from './late-tier.ts';

export interface DiskOptions {
  readonly bytes: number;
  /** Folders on devices of their own; default: one in the data folder. */
  readonly dirs?: readonly (string | { readonly dir: string; readonly bytes: number })[] | undefined;
  readonly eviction?: DiskTierOptions['policy'];
  readonly ioBackend: 'auto' | 'io_uring' | 'threads';
  readonly segmentBytes?: number | undefined;
}

/** What the store does with one lower tier; what is not said is as `TierPlan` has it. */
export interface Placement extends Partial<TierPlan> {
  readonly codec?: CodecName;
}

export interface LowerOptions {
  readonly disk: DiskOptions | null;
  readonly redis: RedisSettings | null;
  readonly s3: S3Settings | null;
  /** Open already. */
  readonly peers: Tier | null;
  /** By tier name. */
  readonly placement: Readonly<Record<string, Placement | undefined>>;
  readonly dataDir: string;
  readonly arena: ArenaHandle;
  readonly arenaBytes: number;
  /** The tier that lends slots. */
  readonly slots: ArenaTier;
  readonly clock: Clock;
  readonly log: Log;
}

/** Folders that are named lie on disks of their own; what is remembered of these lies in the data folder, which is there. */
export const mountsFileOf = (dataDir: string): string => path.join(dataDir, 'disk-mounts.json');

const sharedSupports = { persistent: true, shared: true, writable: true, evicts: true };

/** KvError when a tier cannot work from the start: no permission, no room, a cap that is too small, a wrong password. */
export async function openLower(options: LowerOptions): Promise<Tier[]> {
  const { disk, redis, s3, arena, slots, clock, log } = options;
  const memory = new ArenaMemory(arena, options.arenaBytes);
  const opened: Tier[] = [];
  try {
    if (disk !== null) opened.push(await openDisk(disk, options));
    if (options.peers !== null) opened.push(options.peers);
    if (redis !== null) {
      const { RedisTier } = await import('@kvtier/tiers/redis');
      const open = () => RedisTier.open({ settings: redis, arena, memory, slots, log, clock });
      opened.push(
        await openOrLater({ name: 'redis', supports: sharedSupports, capacityBytes: redis.bytes, open, clock, log }),
      );
    }
    if (s3 !== null) {
      const { S3Tier, loadSdk } = await import('@kvtier/tiers/s3');
      await loadSdk(); // on a busy machine seconds, which are not the server's
      // A node that only reads needs no permission to write, and lacks nothing without it.
      const isReadOnly = options.placement.s3?.write === 'none';
      const supports = { ...sharedSupports, writable: !isReadOnly };
      const open = () => S3Tier.open({ ...s3, arena, memory, slots, log, isReadOnly });
      opened.push(await openOrLater({ name: 's3', supports, capacityBytes: s3.bytes, open, clock, log }));
    }
  } catch (error) {
    for (const tier of opened) await tier.close();
    throw error;
  }
  return opened.map((tier) => withCodec(tier, memory, options));
}

async function openDisk(disk: DiskOptions, { dataDir, arena, slots, log }: LowerOptions): Promise<Tier> {
  const tier = await DiskTier.open({
    dirs: (disk.dirs ?? [path.join(dataDir, 'segments')]).map((place) =>
      typeof place === 'string' ? place : { dir: place.dir, capacityBytes: place.bytes },
    ),
    mountsFile: disk.dirs && mountsFileOf(dataDir),
    policy: disk.eviction,
    capacityBytes: disk.bytes,
    segmentBytes: disk.segmentBytes,
    arena,
    slots,
    log,
    io: { backend: disk.ioBackend },
  });
  const { backend, reason } = tier.ioBackend;
  if (disk.ioBackend === 'auto' && backend !== 'io_uring') {
    log.warn({ backend, reason }, 'io_uring is not available; the disk tier reads and writes with threads');
  }
  return tier;
}

/** Also with codec "none": what an earlier life encoded is still read. */
function withCodec(inner: Tier, memory: ArenaMemory, options: LowerOptions): Tier {
  const { arena, slots, clock, placement } = options;
  const codec = placement[inner.name]?.codec ?? 'none';
  return new CodecTier({ inner, codec, arena, memory, slots, nowUs: () => clock.nowUs() });
}
