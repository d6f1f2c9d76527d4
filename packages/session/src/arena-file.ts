/**
 * The arena's shared-memory file: DIR/kvtier-XXXXXXXX-YYYYYYYY, where X names the data folder and Y this life of its
 * node. Invariant: at most one such file per data folder outlives a node; the next one removes it before it makes its
 * own. Call with the data folder locked.
 */
import { createHash, randomBytes } from 'node:crypto';
import { existsSync, readdirSync, unlinkSync } from 'node:fs';
import { availableParallelism } from 'node:os';
import path from 'node:path';
import { KvError } from '@kvtier/errors';
import { type ArenaHandle, native } from '@kvtier/native';

export interface ArenaFile {
  readonly path: string;
  readonly handle: ArenaHandle;
  readonly id: bigint;
  /** Unmap and remove. */
  close(): void;
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

/** KvError CONFIG, SETUP or IO when `dir` is not there, not writable or has no room for `bytes`. */
export function createArenaFile(
  dir: string,
  realDataDir: string,
  bytes: number,
): ArenaFile & { readonly removed: number } {
  if (!existsSync(dir)) throw new KvError('CONFIG', `arena.dir: ${dir} does not exist; name a shared-memory folder`);
  const prefix = arenaPrefix(realDataDir);
  const file = path.join(dir, prefix + randomBytes(4).toString('hex'));
  try {
    const removed = removeStale(dir, prefix);
    const handle = native.arenaCreate(file, bytes, Math.min(4, availableParallelism()));
    const close = (): void => {
      native.arenaClose(handle);
      unlinkSync(file);
    };
    return { path: file, handle, id: native.arenaId(handle), close, removed };
  } catch (error) {
    throw KvError.from(error, 'SETUP');
  }
}
