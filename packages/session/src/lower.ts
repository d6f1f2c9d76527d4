/** The tiers below the arena, as the configuration asks for them, fastest first. */
import path from 'node:path';
import type { ArenaHandle } from '@kvtier/native';
import type { Log } from '@kvtier/store';
import { type ArenaTier, DiskTier, type Tier } from '@kvtier/tiers';

export interface DiskOptions {
  readonly bytes: number;
  readonly ioBackend: 'auto' | 'io_uring' | 'threads';
  readonly segmentBytes?: number | undefined;
}

export interface LowerOptions {
  readonly disk: DiskOptions | null;
  readonly dataDir: string;
  readonly arena: ArenaHandle;
  /** The tier that lends slots. */
  readonly slots: ArenaTier;
  readonly log: Log;
}

/** KvError when a tier cannot work from the start: no permission, no room, a cap that is too small. */
export async function openLower(options: LowerOptions): Promise<Tier[]> {
  const { disk, dataDir, arena, slots, log } = options;
  if (disk === null) return [];
  const tier = await DiskTier.open({
    dir: path.join(dataDir, 'segments'),
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
  return [tier];
}
