/**
 * The arena's shared-memory file: DIR/kvtier-XXXXXXXX-YYYYYYYY, where X names the data folder (see placeId) and Y this life of its
 * node. Invariant: at most one such file per data folder outlives a node; the next one removes it before it makes its
 * own. Call with the data folder locked.
 */
import { randomBytes } from 'node:crypto';
import {
  chmodSync,
  chownSync,
  closeSync,
  existsSync,
  ftruncateSync,
  openSync,
  rmSync,
  statfsSync,
  statSync,
  writeSync,
} from 'node:fs';
import { availableParallelism } from 'node:os';
import path from 'node:path';
import { isMainThread } from 'node:worker_threads';
import { type ArenaHandle, type MappingHandle, native, type PulseHandle } from '@kvtier/data-plane';
import { emptyHeldTable, heldTableHeaderBytes, pulsePlace } from '@kvtier/data-plane/held-table';
import { arenaPrefix, lockFileOf, removeStaleArenas, unheldArenas } from '@kvtier/data-plane/places';
import { KvError } from '@kvtier/errors';
import type { HeldTable } from '@kvtier/placement';
import { type ArenaPages, PageWatch, smallPageBytes } from './page-watch.ts';

export interface ArenaFile {
  readonly path: string;
  /** What was asked for; on hugetlbfs the whole huge pages of it. */
  readonly bytes: number;
  /** false: its folder is on a disk, and the kernel writes what changes in the arena there. */
  readonly isInMemory: boolean;
  /** How its memory is mapped, as the kernel said a minute ago at most, or at the start where much of it lies in small pages. Never waits. */
  pages(): ArenaPages;
  /** The kernel's first word on that, which may hold the process up: wait for it before anybody is served. */
  readonly pagesKnown: Promise<void>;
  readonly handle: ArenaHandle;
  readonly id: bigint;
  /** Whether its path still leads to it. Where it does not, no engine can attach any more. @throws Error of fs when that cannot be told */
  isThere(): boolean;
  /** Whether somebody holds this byte of the file beside it (`Hold` in session.proto). */
  isByteHeld(byte: number): boolean;
  /** Where engines read what is held (docs/formats.md, "Table of held blocks"); null where there is no room for it. */
  readonly held: HeldTable | null;
  /** Unmap and remove. */
  close(): void;
}

/** As statfs(2) tells file systems in memory. */
const [tmpfsMagic, ramfsMagic, hugetlbfsMagic] = [0x01021994, 0x858458f6, 0x958458f6];

/** One bucket for so many bytes of the arena, within bounds: blocks are larger, so that few of the arena's share one. */
const arenaBytesPerBucket = 4096;
const heldBuckets = { least: 1 << 16, most: 1 << 24 };

/** All of it is written now, so that there is room for it later. Where there is none, and on hugetlbfs, whose files cannot be written: null. */
function makeHeldTable(fd: number, arenaBytes: number): (HeldTable & { close(): void }) | null {
  const { least, most } = heldBuckets;
  const buckets = 2 ** Math.ceil(Math.log2(Math.min(most, Math.max(least, arenaBytes / arenaBytesPerBucket))));
  let mapping: MappingHandle | undefined;
  let pulse: PulseHandle | undefined;
  try {
    const table = emptyHeldTable(buckets);
    for (let at = 0; at < table.length; ) at += writeSync(fd, table, at, table.length - at, at);
    // A tier that lists a million blocks would write as often: as memory it costs next to nothing.
    mapping = native.mapShared(fd, table.length);
    if (isMainThread) pulse = native.pulseStart(fd, pulsePlace(buckets));
  } catch {
    if (mapping !== undefined) native.unmapShared(mapping);
    ftruncateSync(fd, 0);
    return null;
  }
  return {
    buckets,
    write: (bucket, flags) => native.putShared(mapping, heldTableHeaderBytes + bucket, flags),
    close: () => {
      if (pulse !== undefined) native.pulseEnd(pulse);
      native.unmapShared(mapping);
    },
  };
}

/** KvError CONFIG, SETUP or IO when `dir` is not there, not writable or has no room for `wantedBytes`. */
export function createArenaFile(
  dir: string,
  dataDir: string,
  wantedBytes: number,
  group: number | null = null,
): ArenaFile & { readonly removed: number } {
  if (!existsSync(dir)) throw new KvError('CONFIG', `arena.dir: ${dir} does not exist; name a shared-memory folder`);
  try {
    const file = path.join(dir, arenaPrefix(dataDir) + randomBytes(4).toString('hex'));
    const removed = removeStaleArenas(dataDir, dir);
    const { type, bsize } = statfsSync(dir);
    const pageBytes = type === hugetlbfsMagic ? bsize : smallPageBytes;
    const bytes = Math.floor(wantedBytes / pageBytes) * pageBytes;
    const handle = native.arenaCreate(file, bytes, Math.min(4, availableParallelism()));
    let lock: number | undefined;
    let held: ReturnType<typeof makeHeldTable> = null;
    // Either may be gone already: somebody cleans up shared memory.
    const close = (): void => {
      held?.close();
      if (lock !== undefined) {
        closeSync(lock);
        rmSync(lockFileOf(file), { force: true });
      }
      native.arenaClose(handle);
      rmSync(file, { force: true });
    };
    try {
      const own = statSync(file, { bigint: true });
      const byteLock = openSync(lockFileOf(file), 'wx+', 0o600);
      lock = byteLock;
      held = makeHeldTable(byteLock, bytes);
      if (group !== null) {
        for (const name of [file, lockFileOf(file)]) {
          chownSync(name, process.geteuid?.() ?? 0, group);
          chmodSync(name, 0o660);
        }
      }
      const isByteHeld = (byte: number): boolean => native.isByteHeld(byteLock, byte);
      const isThere = (): boolean => {
        const now = statSync(file, { bigint: true, throwIfNoEntry: false });
        return now?.ino === own.ino && now.dev === own.dev;
      };
      const isInMemory = [tmpfsMagic, ramfsMagic, hugetlbfsMagic].includes(type);
      const watch = new PageWatch(file, bytes, pageBytes);
      const pages = (): ArenaPages => watch.pages();
      const id = native.arenaId(handle);
      const told = { isInMemory, pages, pagesKnown: watch.begun, isThere, isByteHeld };
      return { path: file, bytes, ...told, held, handle, id, close, removed };
    } catch (error) {
      close();
      throw error;
    }
  } catch (error) {
    const failure = KvError.from(error, 'SETUP');
    if (failure.code !== 'CAPACITY') throw failure;
    throw new KvError('CAPACITY', failure.message + unheldArenas(dataDir, dir), { cause: error });
  }
}
