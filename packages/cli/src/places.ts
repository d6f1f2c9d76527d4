/**
 * Where a system on this machine keeps what. The data folder may lie deep, but a Unix socket's path is limited to 108 bytes, so
 * sockets live in a short run folder (mode 0700, or 0750 of a group; owner checked) named by the data folder's own id.
 */
import {
  accessSync,
  chmodSync,
  chownSync,
  constants,
  existsSync,
  lstatSync,
  mkdirSync,
  realpathSync,
  rmdirSync,
  rmSync,
  type Stats,
  statfsSync,
  statSync,
  utimesSync,
} from 'node:fs';
import { dirname, join } from 'node:path';
import { readGroup } from '@kvtier/config';
import { listDir, placeId } from '@kvtier/data-plane/places';
import { KvError } from '@kvtier/errors';
import { formatBytes } from './bytes.ts';

export const arenaDir = '/dev/shm';

/** Smallest arena that is of any use; the cache node refuses less than 1 MiB. */
export const minArenaBytes = 8 * 2 ** 20;
export const minDiskBytes = 64 * 2 ** 20;
const MiB = 2 ** 20;
const defaultArenaBytes = 2 ** 30;
const defaultDiskBytes = 8 * 2 ** 30;

/** Creates the data folder (0700) and returns its real path. @throws KvError CONFIG */
export function openDataDir(dataDir: string): string {
  try {
    makeFolder(dataDir);
    accessSync(dataDir, constants.R_OK | constants.W_OK | constants.X_OK);
    return realpathSync(dataDir);
  } catch (error) {
    throw unusable(dataDir, error);
  }
}

/** What `openDataDir` would say, and nothing is made. @throws KvError CONFIG */
export function checkDataDir(dataDir: string): true {
  try {
    const there = existing(dataDir);
    if (!statSync(there).isDirectory()) throw new Error(`${there} is no folder`);
    accessSync(there, constants.R_OK | constants.W_OK | constants.X_OK);
    return true;
  } catch (error) {
    throw unusable(dataDir, error);
  }
}

/** It, or the nearest folder above it that is there: its disk is the one that counts. */
export const existing = (folder: string): string => (existsSync(folder) ? folder : existing(dirname(folder)));

function unusable(dataDir: string, error: unknown): KvError {
  const reason = (error as Error).message.split(',')[0];
  return new KvError(
    'CONFIG',
    `${dataDir}: cannot be used as the data folder (${reason}); name another with --data-dir`,
  );
}

/** `mkdir -p`. Node's own `recursive` never returns where a parent exists but takes no folders, such as /proc. */
function makeFolder(path: string): void {
  try {
    mkdirSync(path, { mode: 0o700 });
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException;
    if (code === 'EEXIST' && statSync(path).isDirectory()) return;
    if (code !== 'ENOENT' || existsSync(dirname(path))) throw error;
    makeFolder(dirname(path));
    makeFolder(path);
  }
}

/**
 * Creates the run folder anew and empty; one of another user's, or what is no folder, stays as it is. Call it only under the data folder's
 * lock.
 * @param group who is in it sees the folder, too (0750); a user's own run folder would hide it
 * @throws KvError SETUP
 */
export function openRunDir(dataDir: string, env = process.env, group: number | null = null): string {
  const base = group === null ? env.XDG_RUNTIME_DIR : undefined;
  const id = placeId(dataDir);
  const short = base && base.length < 60 && isUsable(base);
  const path = short ? join(base, `kvtier-${id}`) : `/tmp/kvtier-${process.getuid!()}-${id}`;
  try {
    removeOwn(path);
    makeRunDir(path, group);
    return path;
  } catch (error) {
    throw new KvError(
      'SETUP',
      `${path}: cannot hold our sockets (${(error as Error).message}); remove it and start again`,
    );
  }
}

/**
 * /tmp is everybody's, and the name can be known: what lies there may be another user's, who swaps its folders for links while they are
 * emptied. Of one that is ours nobody else can. @throws Error: it is not ours
 */
export function removeOwn(path: string): void {
  // Who makes it from now on makes `mkdir` fail.
  if (isOwnFolder(path)) rmSync(path, { recursive: true });
}

/** Whether it is there, as a folder of ours. @throws Error: something else is */
export function isOwnFolder(path: string): boolean {
  const stat = lstatSync(path, { throwIfNoEntry: false });
  if (stat !== undefined) checkOwn(stat);
  return stat !== undefined;
}

/** @throws Error */
function checkOwn(stat: Stats): void {
  if (stat.uid !== process.getuid!()) throw new Error('it belongs to another user');
  if (!stat.isDirectory()) throw new Error('it is no folder');
}

/** Where nothing is; nothing is left where it cannot be as it has to. @throws Error of fs */
export function makeRunDir(path: string, group: number | null): void {
  mkdirSync(path, { mode: 0o700 });
  try {
    checkOwn(lstatSync(path));
    if (group === null) return;
    chownSync(path, -1, group);
    chmodSync(path, 0o750);
  } catch (error) {
    rmdirSync(path);
    throw error;
  }
}

/** Its number; null: none was named. @throws KvError CONFIG when there is none of that name, or this user may give it no folder */
export function givableGroup(group: string | number | null): number | null {
  const id = readGroup(group);
  if (id === null || process.geteuid!() === 0) return id;
  if (id === process.getegid!() || process.getgroups!().includes(id)) return id;
  const what = `this user is not in group ${group}; add it (usermod -aG ${group} USER) and log in again`;
  throw new KvError('CONFIG', `--group: ${what}`);
}

/** Far below the age at which cleaners of /tmp remove what nobody touches: ten days with systemd-tmpfiles, if not set shorter. */
const touchEveryMs = 3_600_000;

/**
 * Keeps what lies in the run folder from looking forgotten. A cleaner spares a socket in use by the path that it was bound at; ours are
 * bound beside their names (`bindPrivately`), and one connection may stay open for weeks. Until the returned function is called.
 */
export function keepTouched(runDir: string, everyMs = touchEveryMs): () => void {
  const timer = setInterval(() => {
    const now = new Date();
    try {
      if (!isOwnFolder(runDir)) return;
    } catch {
      return; // a cleaner has taken it, and another user has made it
    }
    for (const path of [runDir, ...listDir(runDir).map((name) => join(runDir, name))]) {
      try {
        utimesSync(path, now, now);
      } catch {
        // It ended meanwhile.
      }
    }
  }, everyMs);
  timer.unref();
  return () => clearInterval(timer);
}

function isUsable(folder: string): boolean {
  try {
    accessSync(folder, constants.W_OK | constants.X_OK);
    return true;
  } catch {
    return false;
  }
}

export interface Budget {
  readonly bytes: number;
  /** Set when it is less than the default, for a person to read. */
  readonly remark?: string;
}

/**
 * Arena bytes: as asked, else 1 GiB, 90 % of what /dev/shm has free, or half of the free memory. The arena is memory from its start on,
 * whatever size /dev/shm says that it has: a control group with less ends the node, or another process in it. @throws KvError CONFIG
 */
export function arenaBudget(asked: number | null, freeBytes: number, freeMemoryBytes: number): Budget {
  if (asked !== null) {
    if (asked > freeBytes) {
      throw new KvError(
        'CONFIG',
        `--arena-bytes: ${formatBytes(asked)} is more than ${arenaDir} has free (${formatBytes(freeBytes)}); ` +
          `ask for less, or ${enlarged(asked, freeBytes)}`,
      );
    }
    if (asked > freeMemoryBytes) {
      throw new KvError(
        'CONFIG',
        `--arena-bytes: ${formatBytes(asked)} is more memory than is free (${formatBytes(freeMemoryBytes)}); ` +
          'ask for less, or raise the memory limit (docker run --memory)',
      );
    }
    return { bytes: asked };
  }
  const [fits, fitsMemory] = [floorTo(freeBytes * 0.9, MiB), floorTo(freeMemoryBytes / 2, MiB)];
  if (Math.min(fits, fitsMemory) >= defaultArenaBytes) return { bytes: defaultArenaBytes };
  if (fits < minArenaBytes) {
    throw new KvError(
      'CONFIG',
      `${arenaDir}: only ${formatBytes(freeBytes)} free, the arena needs ${formatBytes(minArenaBytes)}; ` +
        enlarged(defaultArenaBytes, freeBytes),
    );
  }
  if (fitsMemory < minArenaBytes) {
    throw new KvError(
      'CONFIG',
      `memory: only ${formatBytes(freeMemoryBytes)} free, the arena needs ${formatBytes(minArenaBytes)} and may take half; ` +
        'raise the memory limit (docker run --memory)',
    );
  }
  if (fitsMemory < fits) {
    const remark = `arena of ${formatBytes(fitsMemory)}: only ${formatBytes(freeMemoryBytes)} of memory free`;
    return { bytes: fitsMemory, remark };
  }
  return { bytes: fits, remark: `arena of ${formatBytes(fits)}: ${arenaDir} has only ${formatBytes(freeBytes)} free` };
}

/** How a person makes room for an arena of so many bytes: whole GiB, beside what lies there already. */
function enlarged(bytes: number, freeBytes: number): string {
  const { blocks, bsize } = statfsSync(arenaDir);
  const usedBytes = Math.max(0, blocks * bsize - freeBytes);
  const gib = Math.ceil((bytes + usedBytes) / 2 ** 30);
  return `enlarge it: mount -o remount,size=${gib}G ${arenaDir} (docker run --shm-size=${gib}g)`;
}

/**
 * Disk bytes: as asked, else 8 GiB or 80 % of what is free for us. `ownDirs`: data folders of the nodes that share them. `ownBytes`:
 * what their disk tiers hold already; it counts as free, because it is within the same cap. `leavingDirs`: of former nodes; their bytes
 * lie there until these have started, and so nothing is chosen that needs them; what is asked for may. @throws KvError CONFIG
 */
export function diskBudget(
  asked: number | null,
  dataDir: string,
  ownDirs: readonly string[] = [dataDir],
  leavingDirs: readonly string[] = [],
  freeBytes = freeBytesOf(dataDir),
  ownBytes = ownDirs.reduce((bytes, dir) => bytes + bytesBelow(join(dir, 'segments')), 0),
): Budget {
  const available = freeBytes + ownBytes;
  if (asked !== null) {
    const soon = available + leavingBytes(leavingDirs, dataDir);
    if (asked > soon) {
      throw new KvError(
        'CONFIG',
        `--disk-bytes: ${formatBytes(asked)} is more than the disk of ${dataDir} has free (${formatBytes(soon)}); ask for less`,
      );
    }
    return { bytes: asked };
  }
  const fits = floorTo(available * 0.8, 2 ** 20);
  if (fits >= defaultDiskBytes) return { bytes: defaultDiskBytes };
  if (fits < minDiskBytes) {
    throw new KvError(
      'CONFIG',
      `${dataDir}: only ${formatBytes(available)} free, the disk tier needs ${formatBytes(minDiskBytes)}; ` +
        'free some space or name a folder on another disk with --data-dir',
    );
  }
  return { bytes: fits, remark: `disk tier of ${formatBytes(fits)}: only ${formatBytes(available)} free there` };
}

const floorTo = (bytes: number, unit: number): number => Math.floor(bytes / unit) * unit;

export function freeBytesOf(dir: string): number {
  try {
    const stat = statfsSync(dir);
    return stat.bavail * stat.bsize;
  } catch (error) {
    throw new KvError('SETUP', `${dir}: cannot be examined (${(error as Error).message}); is it mounted?`);
  }
}

/** A folder that is a link or a mount point may lie on another disk. */
function leavingBytes(dirs: readonly string[], dataDir: string): number {
  const here = dirs.filter((dir) => statSync(dir).dev === statSync(dataDir).dev);
  return here.reduce((bytes, dir) => bytes + bytesBelow(join(dir, 'segments')), 0);
}

/** Nobody else changes the folder: it is ours by the lock. */
function bytesBelow(dir: string): number {
  return listDir(dir).reduce((bytes, name) => bytes + lstatSync(join(dir, name)).blocks * 512, 0);
}
