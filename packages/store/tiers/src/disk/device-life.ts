/** What lives of a device from one recovery to the next failure: its segments, as its folder has them, and what writes into them. */
import { Appender } from './appender.ts';
import { takeOver } from './device-contents.ts';
import type { DeviceFiles } from './device-files.ts';
import type { DiskIndex } from './disk-index.ts';
import type { DiskIo } from './disk-io.ts';
import type { DeviceRoom } from './file-room.ts';
import { type DiskTierOptions, defaultMaxPendingBytes, type planCapacity } from './options.ts';
import type { Segment } from './segment.ts';
import { SegmentPool } from './segment-pool.ts';

export interface Life {
  readonly pool: SegmentPool;
  readonly appender: Appender;
}

export interface LifeParts {
  /** Of the device. */
  readonly number: number;
  readonly dir: string;
  readonly io: DiskIo;
  readonly files: DeviceFiles;
  readonly index: DiskIndex;
  readonly options: DiskTierOptions;
  readonly plan: ReturnType<typeof planCapacity>;
  /** Space for one segment will do; else there has to be space for the one that was not there. */
  readonly isFirst: boolean;
  readonly room: DeviceRoom;
  readonly writeRoom: DeviceRoom;
  readonly timeoutMs: number;
  readonly nowMs: () => number;
  /** What a life that ended had removed and not marked yet. */
  readonly erased: ReadonlyMap<string, readonly number[]>;
  /** Names that were removed since it ended. */
  readonly removed: ReadonlySet<string>;
  readonly badPlaces: ReadonlySet<string>;
  /** Its segments are being listed. */
  readonly onPool: (pool: SegmentPool) => void;
  readonly onEvict: (segment: Segment) => Promise<void>;
  readonly onRefilled: () => void;
  readonly onFailure: (error: unknown) => void;
}

/** The slowest preparation of a file that is not called hanging. */
const slowestPrepareBytesPerMs = 10_000;

/** @throws KvError IO: the folder cannot be used */
export async function beginLife(parts: LifeParts): Promise<Life> {
  const { dir, files, io, index, options, plan, erased, removed, badPlaces, nowMs, onFailure } = parts;
  const { log, onStep } = options;
  const { pool, open, bytes } = await takeOver({ dir, files, index, log, ...plan, erased, removed, badPlaces }, () => {
    const made = poolOf(parts);
    parts.onPool(made);
    return made;
  });
  await pool.ensureUsable(parts.isFirst);
  const appender = new Appender({
    ...{ pool, index, io, open, nowMs, onFailure, room: parts.writeRoom },
    maxPendingBytes: options.maxPendingBytes ?? defaultMaxPendingBytes,
    step: (step) => onStep?.(step),
  });
  pool.prepareAhead(false);
  const { backend, reason } = io.backend;
  const fields = { dir, segments: pool.segments.size, blocks: index.count, bytes, backend, reason };
  log.info(fields, 'a device of the disk tier is open');
  return { pool, appender };
}

function poolOf({ number, dir, io, files, index, options, plan, timeoutMs, ...parts }: LifeParts): SegmentPool {
  const { limitBytes, segmentBytes } = plan;
  const { room, writeRoom, onEvict, onRefilled, onFailure } = parts;
  return new SegmentPool({
    ...{ dir, device: number, limitBytes, segmentBytes, io, files, index, room, writeRoom },
    ...{ onEvict, onRefilled, onFailure },
    mayGrow: options.segmentBytes === undefined,
    policy: options.policy ?? 'lru',
    prepareLimitMs: timeoutMs + segmentBytes / slowestPrepareBytesPerMs,
    step: (step) => options.onStep?.(step),
  });
}
