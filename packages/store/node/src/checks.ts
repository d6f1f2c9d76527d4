/**
 * What a start of the cache node would find, looked at without one: nothing is bound, made or removed, and a node that runs with this
 * configuration now does not matter, since the next one starts when it has ended.
 */
import { accessSync, constants, existsSync, statfsSync, statSync } from 'node:fs';
import path from 'node:path';
import {
  type CacheNodeConfig,
  readGroup,
  readKvEventsCurve,
  readPeerCredentials,
  type ServerTlsConfig,
} from '@kvtier/config';
import { ownArenaBytes, unheldArenas } from '@kvtier/data-plane/places';
import { KvError } from '@kvtier/errors';
import { failpointFromEnv } from '@kvtier/placement';
import { checkSocketPath } from '@kvtier/session';
import type { Check } from '@kvtier/telemetry';
import { FolderMounts, isOnRoot, placesOf, planCapacity } from '@kvtier/tiers';
import { mountsFileOf } from './lower.ts';

const onProblem = (): void => {}; // nobody waits for a second look at the files

export function cacheNodeChecks(config: CacheNodeConfig): readonly Check[] {
  const { peers, kvEvents, operations, redis, s3, membership, arena, disk, dataDir } = config;
  const dirs = disk?.dirs?.map((each) => (typeof each === 'string' ? each : each.dir)) ?? [];
  return [
    () => readGroup(config.group),
    () => failpointFromEnv(process.env),
    () => checkFolder('dataDir', dataDir),
    () => checkSocketPath(config.socketPath),
    () => checkFolder('socketPath', path.dirname(config.socketPath)),
    () => checkArena(arena, dataDir),
    () => disk && checkCapacities(disk, dataDir),
    ...dirs.map((dir, at) => () => checkDiskFolder(`disk.dirs.${at}`, dir, dataDir)),
    () => peers && readPeerCredentials(peers.security, onProblem),
    () => kvEvents && readKvEventsCurve(kvEvents, onProblem),
    async () => operations?.tls && checkTls(operations.tls),
    async () => redis && (await import('@kvtier/tiers/redis')).checkRedis(redis),
    async () => membership && (await import('@kvtier/membership')).checkList(membership.redis, 'membership.redis'),
    async () => s3 && (await import('@kvtier/tiers/s3')).checkS3(s3),
  ];
}

async function checkTls(files: ServerTlsConfig): Promise<void> {
  const { renewedTls } = await import('@kvtier/wire/tls'); // as all here that a start may do without
  renewedTls(files, { place: 'operations.tls', reloadMs: files.reloadMs, onProblem }).close();
}

/** Of each device by itself: it has a share of the tier's bytes, or its own. */
function checkCapacities(disk: NonNullable<CacheNodeConfig['disk']>, dataDir: string): void {
  const dirs = (disk.dirs ?? [dataDir]).map((each) =>
    typeof each === 'string' ? each : { dir: each.dir, capacityBytes: each.bytes },
  );
  for (const { capacityBytes } of placesOf({ dirs, capacityBytes: disk.bytes }))
    planCapacity(capacityBytes, disk.segmentBytes);
}

/** One that is there, or can be made. */
function checkFolder(key: string, folder: string): void {
  const remedy = 'choose a folder that you may write to';
  try {
    const there = existing(path.resolve(folder));
    if (!statSync(there).isDirectory()) throw new Error(`${there} is no folder`);
    accessSync(there, constants.R_OK | constants.W_OK | constants.X_OK);
  } catch (error) {
    throw new KvError('SETUP', `${key}: ${folder} cannot be made or written (${(error as Error).message}); ${remedy}`);
  }
}

/** One that lies where it lay before, and is there or can be made in the one above it: else its disk is not mounted. */
async function checkDiskFolder(key: string, folder: string, dataDir: string): Promise<void> {
  const above = path.dirname(path.resolve(folder));
  const ask = async (at: string) => {
    const found = statSync(at, { bigint: true, throwIfNoEntry: false });
    return found === undefined ? null : { device: found.dev, inode: found.ino };
  };
  if (!existsSync(folder) && !existsSync(above) && (await isOnRoot(folder, ask))) {
    const remedy = 'mount its disk, or make that folder';
    throw new KvError('SETUP', `${key}: ${folder} cannot be made: there is no folder ${above}; ${remedy}`);
  }
  const mounts = await FolderMounts.read(mountsFileOf(dataDir), [folder]);
  await mounts.check(folder, ask);
  checkFolder(key, folder);
}

/** It, or the nearest folder above it that is there. */
const existing = (folder: string): string => (existsSync(folder) ? folder : existing(path.dirname(folder)));

/** What former lives left in the folder goes before the arena is made. */
function checkArena({ dir, bytes }: CacheNodeConfig['arena'], dataDir: string): void {
  if (!existsSync(dir)) throw new KvError('CONFIG', `arena.dir: ${dir} does not exist; name a shared-memory folder`);
  checkFolder('arena.dir', dir);
  const { bavail, bsize } = statfsSync(dir);
  const freeBytes = bavail * bsize + ownArenaBytes(dataDir, dir);
  if (bytes <= freeBytes) return;
  const remedy = `enlarge the file system (docker: --shm-size) or make the arena smaller${unheldArenas(dataDir, dir)}`;
  throw new KvError('CAPACITY', `arena.bytes: ${bytes} bytes do not fit ${dir} (${freeBytes} free); ${remedy}`);
}
