/**
 * Recency of a device's blocks, written for its next start: a hint only, 8 bytes a block. Gathered, encoded and handed to the device in
 * parts, so that nobody waits for all of it; and the larger it is, the more seldom.
 */
import { join } from 'node:path';
import { native } from '@kvtier/data-plane';
import type { DeviceFiles } from './device-files.ts';
import type { DiskIndex } from './disk-index.ts';
import { checkpointBytes, encodingCheckpoint, pageBytes, type SegmentUses } from './format.ts';
import type { DiskTierOptions } from './options.ts';
import { checkpointName, unfinishedSuffix } from './recovery.ts';
import type { SegmentPool } from './segment-pool.ts';

/** Handed over in one turn, which copies it. */
const partBytes = 1 << 20;
/** In the long run. */
const mostBytesPerMs = 256;

/** How long after the last one, of so many bytes, another is due; `leastMs`: in any case. */
export const checkpointEveryMs = (leastMs: number, lastBytes: number): number =>
  Math.max(leastMs, lastBytes / mostBytesPerMs);

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
 * Its tick and bytes; undefined: it would be too large, and none is written.
 * @throws KvError IO
 */
export async function writeCheckpoint(
  pool: Pick<SegmentPool, 'coldestFirst'>,
  parts: CheckpointParts,
): Promise<{ readonly tick: number; readonly bytes: number } | undefined> {
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
    await nextTurn();
  }
  const encoding = encodingCheckpoint({ tick, segments });
  let encoded = encoding.next();
  for (; !encoded.done; encoded = encoding.next()) await nextTurn();
  const bytes = encoded.value;
  const path = join(dir, checkpointName);
  await writeParts(files, path + unfinishedSuffix, bytes);
  step('disk.close.checkpoint');
  await files.run((handle) => native.fileRename(handle, path + unfinishedSuffix, path));
  return { tick, bytes: bytes.length };
}

async function writeParts(files: DeviceFiles, path: string, bytes: Buffer): Promise<void> {
  await files.run((handle) => native.fileMake(handle, path, bytes.subarray(0, partBytes)));
  try {
    for (let at = partBytes; at < bytes.length; at += partBytes) {
      const part = bytes.subarray(at, at + partBytes);
      await files.run((handle) => native.fileWrite(handle, path, Float64Array.of(at), part));
    }
  } catch (error) {
    // Its space is not to be taken by a part of it.
    await files.run((handle) => native.fileRemove(handle, path)).catch(() => {});
    throw error;
  }
}

const nextTurn = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));
