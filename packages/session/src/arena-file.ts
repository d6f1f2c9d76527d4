/**
 * The arena's shared-memory file: DIR/kvtier-XXXXXXXX-YYYYYYYY, where X names the data folder and Y this life of its
 * node. Invariant: at most one such file per data folder outlives a node; the next one removes it before it makes its
 * own. Call with the data folder locked.
 */
import { createHash, randomBytes } from 'node:crypto';
import { existsSync, readdirSync, readFileSync, statfsSync, unlinkSync } from 'node:fs';
import { availableParallelism } from 'node:os';
import path from 'node:path';
import { KvError } from '@kvtier/errors';
import { type ArenaHandle, native } from '@kvtier/native';

export interface ArenaFile {
  readonly path: string;
  /** What was asked for; on hugetlbfs the whole huge pages of it. */
  readonly bytes: number;
  /** How its memory is mapped, for the log. */
  readonly pages: ArenaPages;
  readonly handle: ArenaHandle;
  readonly id: bigint;
  /** Unmap and remove. */
  close(): void;
}

export interface ArenaPages {
  /** Of the file system: 4096, or more on hugetlbfs. */
  readonly pageBytes: number;
  /** Bytes that lie in transparent huge pages, as many as the kernel had to give. */
  readonly transparentBytes: number;
}

const hugetlbfsMagic = 0x958458f6;
const smallPageBytes = 4096;

/** What the kernel gave this mapping; nothing huge when it does not say. */
function pagesOf(file: string, pageBytes: number): ArenaPages {
  try {
    const maps = readFileSync('/proc/self/smaps', 'utf8');
    const own = maps.slice(maps.indexOf(file));
    const transparent = /^ShmemPmdMapped: +(\d+) kB$/m.exec(own);
    return { pageBytes, transparentBytes: Number(transparent?.[1] ?? 0) * 1024 };
  } catch {
    return { pageBytes, transparentBytes: 0 };
  }
}

/** What all arena files of this data folder begin with; `realDataDir` without symbolic links. */
export function arenaPrefix(realDataDir: string): string {
  return `kvtier-${createHash('sha256').update(realDataDir).digest('hex').slice(0, 8)}-`;
}

/** Engines that have mapped an old file keep their mapping; they learn of the new one when they attach again. */
function removeStale(dir: string, prefix: string): number {
  const stale = readdirSync(dir).filter((name) => name.startsWith(prefix));
  for (const name of stale) unlinkSync(path.join(dir, name));
  return stale.length;
}

/** KvError CONFIG, SETUP or IO when `dir` is not there, not writable or has no room for `wantedBytes`. */
export function createArenaFile(
  dir: string,
  realDataDir: string,
  wantedBytes: number,
): ArenaFile & { readonly removed: number } {
  if (!existsSync(dir)) throw new KvError('CONFIG', `arena.dir: ${dir} does not exist; name a shared-memory folder`);
  const prefix = arenaPrefix(realDataDir);
  const file = path.join(dir, prefix + randomBytes(4).toString('hex'));
  try {
    const removed = removeStale(dir, prefix);
    const { type, bsize } = statfsSync(dir);
    const pageBytes = type === hugetlbfsMagic ? bsize : smallPageBytes;
    const bytes = Math.floor(wantedBytes / pageBytes) * pageBytes;
    const handle = native.arenaCreate(file, bytes, Math.min(4, availableParallelism()));
    const close = (): void => {
      native.arenaClose(handle);
      unlinkSync(file);
    };
    const pages = pagesOf(file, pageBytes);
    return { path: file, bytes, pages, handle, id: native.arenaId(handle), close, removed };
  } catch (error) {
    throw KvError.from(error, 'SETUP');
  }
}
