/**
 * What a disk tier is made with, and how a device's capacity is divided: whole segments, and a part for metadata that no
 * segment ever takes.
 */

import type { ArenaHandle } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';
import type { PolicyName } from '@kvtier/eviction';
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Log as DiskLog } from '@kvtier/runtime';
import { pageBytes } from './format.ts';

/** Named steps for tests that stop the process there. */
export type DiskStep =
  | 'disk.segment.prepared'
  | 'disk.segment.opened'
  | 'disk.segment.evicted'
  | 'disk.seal.before'
  | 'disk.seal.after'
  | 'disk.write.submitted'
  | 'disk.write.stored'
  | 'disk.close.checkpoint';

export interface IoSettings {
  readonly backend: 'auto' | 'io_uring' | 'threads';
  /** System I/Os in flight. */
  readonly depth: number;
  /** Bytes of one system I/O, about. */
  readonly ioBytes: number;
}

/** What a tier needs of the arena tier above it: the size of a slot, slots on loan, and a hold on slots that hang. */
export interface ArenaSlots {
  slotBytesOf(slot: number): number;
  allocate(namespace: Namespace, payloadBytes: number): number | undefined;
  /** A slot for at least so many bytes, header included, that never becomes a block: it costs no size of its own. */
  lend(namespace: Namespace, bytes: number): number | undefined;
  free(slot: number): void;
  /** The slot's memory is given to nobody, whatever its owner does with it, until `release`. Counted. */
  hold(slot: number): void;
  release(slot: number): void;
}

/** One folder, on a device of its own; it is a failure domain: when it breaks, only what it holds is gone. */
export interface DiskPlace {
  /** Made when it is not there, in the one above it. One tier at a time (locked). */
  readonly dir: string;
  readonly capacityBytes: number;
}

/** When to try a broken device again, doubling from the first to the longest wait. */
export interface RetrySettings {
  readonly firstMs: number;
  readonly longestMs: number;
}

export interface DiskTierOptions {
  /** The folder of the segments; with `dirs`, none. */
  readonly dir?: string;
  /** Of all devices together. */
  readonly capacityBytes: number;
  /** Several devices, blocks striped over them. A path without a budget of its own gets an even share of `capacityBytes`. */
  readonly dirs?: readonly (string | DiskPlace)[];
  readonly arena: ArenaHandle;
  readonly slots: ArenaSlots;
  readonly log: DiskLog;
  /** Default: an eighth of a device's capacity, at most 256 MiB, and more when a block needs it. */
  readonly segmentBytes?: number | undefined;
  /** Chooses the segment that goes when a device is full; default LRU. */
  readonly policy?: PolicyName | undefined;
  readonly io?: Partial<IoSettings>;
  /** Writes that may wait or be in flight, per device; more are refused. */
  readonly maxPendingBytes?: number;
  /** A read or write that takes longer has failed, and its device is out of service. */
  readonly timeoutMs?: number;
  readonly retry?: RetrySettings;
  /** Where it is remembered on which mounts the folders lie; without, it is not. Its own folder is there. */
  readonly mountsFile?: string | undefined;
  /** How often recency is written down, when it has changed. */
  readonly checkpointMs?: number;
  readonly onOutOfService?: (reason: string) => void;
  readonly onBackInService?: (dir: string) => void;
  readonly onEvict?: (namespace: Namespace, hash: HashKey) => void;
  /** Called at named steps; tests stop the process there. */
  readonly onStep?: (step: DiskStep) => void;
}

/** 8 MiB in flight: 4 GB/s from a device that takes 2 ms. More is slower where the host copies (a virtual disk). */
export const defaultIo: IoSettings = { backend: 'auto', depth: 16, ioBytes: 512 << 10 };
export const defaultMaxPendingBytes = 256 << 20;
export const defaultTimeoutMs = 10_000;
export const defaultRetry: RetrySettings = { firstMs: 1000, longestMs: 60_000 };
export const defaultCheckpointMs = 30_000;
const defaultMaxSegmentBytes = 256 << 20;
const minSegmentBytes = 16 * pageBytes;
/** Kept out of the segments' share: the checkpoint, the lock, the folder itself and the file system's extent blocks. */
const metadataShare = 64;
const minMetadataBytes = 64 << 10;
/** What is written in a configuration: another start fails alike. */
const final = { isFinal: true } as const;

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
      final,
    );
  }
  return { segmentBytes: bytes, limitBytes, metadataBytes };
}

/** The devices that a tier's options name. KvError CONFIG when they name none, or one twice. */
export function placesOf({
  dir,
  dirs,
  capacityBytes,
}: Pick<DiskTierOptions, 'dir' | 'dirs' | 'capacityBytes'>): DiskPlace[] {
  const given = dirs ?? (dir === undefined ? [] : [dir]);
  const own = given.reduce((sum, each) => sum + (typeof each === 'string' ? 0 : each.capacityBytes), 0);
  const sharers = given.filter((each) => typeof each === 'string').length;
  const share = Math.floor((capacityBytes - own) / Math.max(1, sharers));
  const places = given.map((each) => (typeof each === 'string' ? { dir: each, capacityBytes: share } : each));
  if (places.length === 0 || new Set(places.map((place) => place.dir)).size < places.length) {
    throw new KvError('CONFIG', 'disk: no folder, or the same one twice; name one or more different folders', final);
  }
  if (own > capacityBytes) {
    const found = `the folders' budgets are ${own} bytes, more than the tier's ${capacityBytes}`;
    throw new KvError('CONFIG', `disk: ${found}; lower them or raise the tier's bytes`, final);
  }
  return places;
}
