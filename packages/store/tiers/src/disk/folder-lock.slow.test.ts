/** The file system under a folder goes and comes: `mount` needs root. */
import { spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { DeviceFiles } from './device-files.ts';
import { FolderLock } from './folder-lock.ts';

let dir: string;
let mounts: string[];
let files: DeviceFiles;
beforeEach(() => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-lock-'));
  mounts = [];
  files = new DeviceFiles(dir, 10_000, () => performance.now());
});
afterEach(() => {
  files.close();
  for (const mount of mounts) spawnSync('umount', ['--lazy', mount]);
  rmSync(dir, { recursive: true });
});

function mounted(at: string, ...how: string[]): boolean {
  mkdirSync(at, { recursive: true });
  const { status } = spawnSync('mount', [...how, at]);
  if (status === 0) mounts.push(at);
  return status === 0;
}

it('what lies below a mount that has gone is not taken for the folder; the mount is, when it is back', async (context) => {
  const [device, folder] = [join(dir, 'device'), join(dir, 'folder')];
  if (!mounted(device, '-t', 'tmpfs', '-o', 'size=1m', 'kvtier-test')) {
    console.warn('SKIPPED: a mount that goes is not tested: mount needs root');
    return context.skip();
  }
  expect(mounted(folder, '--bind', device)).toBe(true);
  const lock = new FolderLock(folder, files);
  await lock.take();
  expect(spawnSync('umount', [folder]).status, 'busy by the lock').not.toBe(0);
  expect(spawnSync('umount', ['--lazy', folder]).status).toBe(0);
  await expect(lock.take()).rejects.toThrow(
    expect.objectContaining({ code: 'IO', message: expect.stringMatching(/another file system/) }),
  );
  expect(existsSync(join(folder, 'lock'))).toBe(false);
  expect(mounted(folder, '--bind', device)).toBe(true);
  await lock.take();
  await expect(new FolderLock(folder, files).take()).rejects.toThrow(expect.objectContaining({ code: 'LOCKED' }));
  lock.release();
});

it('a folder that was removed is gone; one whose mount has gone is not, and is not to be made below it', async (context) => {
  const [device, folder] = [join(dir, 'device'), join(dir, 'device', 'a', 'b')];
  if (!mounted(device, '-t', 'tmpfs', '-o', 'size=1m', 'kvtier-test')) {
    console.warn('SKIPPED: a mount that goes is not tested: mount needs root');
    return context.skip();
  }
  mkdirSync(folder, { recursive: true });
  const lock = new FolderLock(folder, files);
  expect(await lock.isGone()).toBe(false);
  await lock.take();
  expect(await lock.isGone()).toBe(false);
  rmSync(join(device, 'a'), { recursive: true });
  expect(await lock.isGone()).toBe(true);
  expect(spawnSync('umount', ['--lazy', device]).status).toBe(0);
  const message = `${folder}: is gone, and its place lies on another file system than before; mount what was there, or start the node again`;
  await expect(lock.isGone()).rejects.toThrow(expect.objectContaining({ code: 'IO', message }));
  lock.release();
});
