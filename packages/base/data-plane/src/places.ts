/**
 * Names outside of a data folder that belong to it: arena files in shared memory, run folders. Others may use the same places, also with a
 * data folder at the same path (containers with volumes of their own and one /dev/shm), so the name comes from the folder and not from its path.
 *
 * Invariant: an arena file that a process holds is locked (arenaCreate), and nobody removes a locked one.
 */
import { createHash, randomBytes } from 'node:crypto';
import { lstatSync, readdirSync, readlinkSync, renameSync, rmSync, statSync, symlinkSync } from 'node:fs';
import { join } from 'node:path';
import { native } from './index.ts';

const linkName = 'place.id';
const form = /^(\d+)-([0-9a-f]{8})$/;
const arenaForm = /^kvtier-[0-9a-f]{8}-[0-9a-f]{8}$/;
/** Of files in one line. */
const maxNamed = 4;

/**
 * Eight hexadecimal digits, equal in every life of the data folder and other for every other folder, copies included: a random id, kept in
 * the folder with its inode as the text of a symbolic link, which takes no block and is there as a whole or not at all. Where there
 * are no such links, the folder's device and inode have to do. @throws Error of fs when the folder cannot be read or written
 */
export function placeId(dataDir: string): string {
  const { dev, ino } = statSync(dataDir, { bigint: true });
  const path = join(dataDir, linkName);
  const known = read(path, ino);
  if (known !== undefined) return known;
  const fresh = `${path}.${randomBytes(4).toString('hex')}`;
  try {
    symlinkSync(`${ino}-${randomBytes(4).toString('hex')}`, fresh);
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException;
    if (code !== 'EPERM' && code !== 'EOPNOTSUPP' && code !== 'ENOSYS') throw error;
    return createHash('sha256').update(`${dev}:${ino}`).digest('hex').slice(0, 8);
  }
  renameSync(fresh, path);
  return read(path, ino)!;
}

/** undefined: there is none, or it came here with a copy of another folder. */
function read(path: string, ino: bigint): string | undefined {
  try {
    const [, of, id] = form.exec(readlinkSync(path)) ?? [];
    return of === String(ino) ? id : undefined;
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException;
    if (code === 'EINVAL')
      rmSync(path); // a file of somebody's: the link takes its place
    else if (code !== 'ENOENT') throw error;
    return undefined;
  }
}

/** The file beside an arena, on whose bytes those hold locks who have mapped it. */
export const lockFileOf = (arenaPath: string): string => `${arenaPath}.lock`;

/** What the names of all arena files of this data folder begin with. */
export const arenaPrefix = (dataDir: string): string => `kvtier-${placeId(dataDir)}-`;

/**
 * Removes arena files that former lives of this data folder's node left in `dir`; returns how many. What is in use, or not ours to remove,
 * stays. Engines that have mapped an old file keep their mapping; they learn of the new one when they attach again.
 */
export function removeStaleArenas(dataDir: string, dir: string): number {
  const prefix = arenaPrefix(dataDir);
  const stale = listDir(dir).filter((name) => name.startsWith(prefix) && isRemoved(join(dir, name)));
  return stale.filter((name) => !stale.some((arena) => lockFileOf(arena) === name)).length;
}

/** `arenaPrefix`, where this folder has it already: undefined where there is no such folder, or no node has ever lived there. */
function knownPrefix(dataDir: string): string | undefined {
  try {
    const id = form.exec(readlinkSync(join(dataDir, linkName)))?.[2];
    return id && `kvtier-${id}-`;
  } catch {
    return undefined;
  }
}

/** Of arena files of this data folder, which go before the next one is made; 0 where it has none. Changes nothing. */
export function ownArenaBytes(dataDir: string, dir: string): number {
  const prefix = knownPrefix(dataDir);
  const own = listDir(dir).filter((name) => prefix !== undefined && name.startsWith(prefix));
  return own.reduce((bytes, name) => bytes + bytesOf(join(dir, name)), 0);
}

/**
 * What to add to a complaint that `dir` has no room: arena files of this user that no node holds, the largest first, and that do not go by
 * themselves: of other data folders, also of one that was replaced under this node's feet. '' where there are none.
 */
export function unheldArenas(dataDir: string, dir: string): string {
  const own = knownPrefix(dataDir);
  const unheld = listDir(dir)
    .filter((name) => arenaForm.test(name) && !(own && name.startsWith(own)) && isUnheld(join(dir, name)))
    .map((name) => ({ path: join(dir, name), bytes: bytesOf(join(dir, name)) + bytesOf(lockFileOf(join(dir, name))) }))
    .toSorted((a, b) => b.bytes - a.bytes);
  if (unheld.length === 0) return '';
  const bytes = unheld.reduce((sum, each) => sum + each.bytes, 0);
  const more = unheld.length > maxNamed ? ` and ${unheld.length - maxNamed} more` : '';
  const paths = unheld.slice(0, maxNamed).map(({ path }) => `${path}*`);
  return `; ${bytes} bytes there are arenas that no node holds: remove ${paths.join(' ')}${more}`;
}

/** Bytes that a file takes; 0: it has gone. */
const bytesOf = (path: string): number => (statSync(path, { throwIfNoEntry: false })?.blocks ?? 0) * 512;

function isUnheld(path: string): boolean {
  try {
    const file = lstatSync(path);
    return file.isFile() && file.uid === process.geteuid?.() && !native.isLocked(path);
  } catch {
    return false;
  }
}

function isRemoved(path: string): boolean {
  try {
    return native.unlinkUnlocked(path);
  } catch {
    return false;
  }
}

/** Names in a folder; none where it cannot be read. */
export function listDir(dir: string): string[] {
  try {
    return readdirSync(dir);
  } catch {
    return [];
  }
}
