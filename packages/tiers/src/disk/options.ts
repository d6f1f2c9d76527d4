/**
 * What a disk tier is made with, and how its capacity is divided: whole segments, and a part for metadata that no segment
 * ever takes.
 */
import { KvError } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import type { ArenaHandle } from '@kvtier/native';
import type { IoSettings } from './disk-io.ts';
import { pageBytes } from './format.ts';
import type { DiskStep } from './segment-pool.ts';

export interface DiskLog {
  info(fields: object, message: string): void;
  warn(fields: object, message: string): void;
  error(fields: object, message: string): void;
}

/** What the tier needs of the arena tier above it: the size of a slot, and slots on loan for reinsertion. */
export interface ArenaSlots {
  slotBytesOf(slot: number): number;
  allocate(namespace: Namespace, payloadBytes: number): number | undefined;
  free(slot: number): void;
}

export interface DiskTierOptions {
  /** The folder of the segments; made when it is not there. One tier at a time (locked). */
  readonly dir: string;
  readonly capacityBytes: number;
  readonly arena: ArenaHandle;
  readonly slots: ArenaSlots;
  readonly log: DiskLog;
  /** Default: an eighth of the capacity, at most 256 MiB. */
  readonly segmentBytes?: number | undefined;
  readonly io?: Partial<IoSettings>;
  /** Writes that may wait or be in flight; more are refused. */
  readonly maxPendingBytes?: number;
  readonly onOutOfService?: (reason: string) => void;
  readonly onEvict?: (namespace: Namespace, hash: HashKey) => void;
  /** Called at named steps; tests stop the process there. */
  readonly onStep?: (step: DiskStep) => void;
}

/** Deep enough for a device with many queues: fio reaches its best with 2 to 4 jobs of depth 32. */
export const defaultIo: IoSettings = { backend: 'auto', depth: 64, ioBytes: 512 << 10 };
export const defaultMaxPendingBytes = 256 << 20;
const defaultMaxSegmentBytes = 256 << 20;
const minSegmentBytes = 16 * pageBytes;
/** Kept out of the segments' share: the checkpoint, the lock, the folder itself and the file system's extent blocks. */
const metadataShare = 64;
const minMetadataBytes = 64 << 10;
/** How a capacity is divided. KvError CONFIG when it is too small. */
export function planCapacity(capacityBytes: number, segmentBytes: number | undefined) {
  const metadataBytes = Math.max(minMetadataBytes, Math.floor(capacityBytes / metadataShare / pageBytes) * pageBytes);
  const limitBytes = capacityBytes - metadataBytes;
  const share = Math.min(defaultMaxSegmentBytes, Math.max(minSegmentBytes, limitBytes / 8));
  const bytes = Math.floor((segmentBytes ?? share) / pageBytes) * pageBytes;
  if (bytes < minSegmentBytes || limitBytes < 2 * bytes) {
    throw new KvError(
      'CONFIG',
      `disk: ${capacityBytes} bytes hold no two segments of ${bytes} (at least ${minSegmentBytes}) and ${metadataBytes} of metadata; raise the disk tier's bytes or lower segmentBytes`,
    );
  }
  return { segmentBytes: bytes, limitBytes, metadataBytes };
}
