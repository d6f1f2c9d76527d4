/** Recency of a device's blocks, written for its next start: small, and a hint only. */
import { join } from 'node:path';
import { native } from '@kvtier/data-plane';
import type { DeviceFiles } from './device-files.ts';
import type { DiskIndex } from './disk-index.ts';
import { checkpointBytes, encodeCheckpoint, pageBytes, type SegmentUses } from './format.ts';
import type { DiskTierOptions } from './options.ts';
import { checkpointName, unfinishedSuffix } from './recovery.ts';
import type { SegmentPool } from './segment-pool.ts';

export interface CheckpointParts {
  readonly dir: string;
  readonly files: DeviceFiles;
  readonly index: DiskIndex;
  /** For all that is no segment. */
  readonly metadataBytes: number;
  /** Before the old one is replaced. */
  readonly step: NonNullable<DiskTierOptions['onStep']>;
}

/**
 * Segment after segment, so that nobody waits for all of it. Its tick; undefined: it would be too large, and none is written.
 * @throws KvError IO
 */
export async function writeCheckpoint(pool: SegmentPool, parts: CheckpointParts): Promise<number | undefined> {
  const { dir, files, index, metadataBytes, step } = parts;
  const { table, tick } = index;
  const segments: SegmentUses[] = [];
  const order = [...pool.coldestFirst()];
  // Two of them, while one replaces the other, and a few pages for the folder, the lock and a probe.
  if (2 * checkpointBytes(order.length, index.count) > metadataBytes - 4 * pageBytes) return undefined;
  for (const [rank, segment] of order.entries()) {
    const uses = new Uint32Array(segment.listedCount * 2);
    let at = 0;
    for (const entry of index.listedOf(segment)) {
      uses[at++] = table.page(entry);
      const age = Math.min(2 ** 31 - 1, Math.max(0, tick - table.lastUse(entry)));
      uses[at++] = age * 2 + (table.isHot(entry) ? 1 : 0);
    }
    segments.push({ id: segment.id, generation: segment.generation, rank, uses });
    await new Promise<void>((resolve) => setImmediate(resolve));
  }
  const path = join(dir, checkpointName);
  const bytes = encodeCheckpoint({ tick, segments });
  await files.run((handle) => native.fileMake(handle, path + unfinishedSuffix, bytes));
  step('disk.close.checkpoint');
  await files.run((handle) => native.fileRename(handle, path + unfinishedSuffix, path));
  return tick;
}
