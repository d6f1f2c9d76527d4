/** Calls to file systems, each device's on a thread of its own; one that hangs holds up nobody else. */
import { execFileSync } from 'node:child_process';
import { lookup } from 'node:dns/promises';
import { closeSync, mkdtempSync, openSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { open, readFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { type FilesHandle, native } from './index.ts';

let dir: string;
let files: FilesHandle;
beforeEach(() => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-files-'));
  files = native.filesOpen();
});
afterEach(() => {
  native.filesClose(files);
  rmSync(dir, { recursive: true });
});

it('does to files what it says', async () => {
  const path = join(dir, 'one', 'two', 'file');
  await native.fileFolder(files, join(dir, 'one', 'two'), true);
  await native.fileFolder(files, join(dir, 'one', 'two'), true);
  expect(statSync(join(dir, 'one')).mode & 0o777).toBe(0o700);
  expect(await native.fileBytes(files, path)).toBe(-1);
  await native.fileMake(files, path, Buffer.from('0123456789'));
  expect(statSync(path).mode & 0o777).toBe(0o600);
  expect(await native.fileBytes(files, path)).toBe(10);
  await native.fileWrite(files, path, Float64Array.of(8, 2), Buffer.from('abxy'));
  expect(readFileSync(path, 'latin1')).toBe('01xy4567ab');
  const piece = Buffer.from('0123');
  const padding = native.fileWrite(files, path, Float64Array.of(0, 4), piece, 3);
  piece.fill('z'); // it has been taken
  await padding;
  expect(readFileSync(path, 'latin1')).toBe('01\x00y23\x007ab');
  await native.fileWrite(files, path, Float64Array.of(0), Buffer.from('01xy4567ab'));
  expect((await native.fileRead(files, path, 2, 3)).toString()).toBe('xy4');
  expect((await native.fileRead(files, path, 8, 100)).toString()).toBe('ab');
  expect(await native.fileRead(files, path, 50, 4)).toHaveLength(0);
  await native.fileMake(files, path, Buffer.from('new'));
  await native.fileRename(files, path, `${path}-2`);
  expect(await native.fileNames(files, join(dir, 'one', 'two'))).toEqual(['file-2']);
  expect(readFileSync(`${path}-2`, 'latin1')).toBe('new');
  await native.fileRemove(files, `${path}-2`);
  await native.fileRemove(files, `${path}-2`);
  expect(readdirSync(join(dir, 'one', 'two'))).toEqual([]);
});

it('makes the last folder alone, where it is not to make those above it', async () => {
  const above = join(dir, 'above');
  await expect(native.fileFolder(files, join(above, 'one'), false)).rejects.toMatchObject({
    message: `IO: ${join(above, 'one')}: cannot be made (No such file or directory)`,
    errno: 2,
  });
  expect(readdirSync(dir)).toEqual([]);
  await native.fileFolder(files, above, false);
  await native.fileFolder(files, above, false);
  expect(readdirSync(dir)).toEqual(['above']);
});

it('tells which file it is, and locks it on its thread', async () => {
  const path = join(dir, 'lock');
  expect(await native.fileIdentity(files, path)).toBeNull();
  const { lock, ...identity } = await native.fileLock(files, path);
  const { dev, ino } = statSync(path, { bigint: true });
  expect(identity).toEqual({ device: dev, inode: ino });
  expect(await native.fileIdentity(files, path)).toEqual(identity);
  const locked = { message: `LOCKED: ${path}: held by process ${process.pid}; stop it or choose another folder` };
  for (const error of [
    await native.fileLock(files, path).catch((thrown: unknown) => thrown),
    thrownBy(() => native.lockFile(path)),
  ]) {
    expect(error).toMatchObject(locked);
    expect(error).not.toHaveProperty('errno');
  }
  native.unlock(lock);
  native.unlock((await native.fileLock(files, path)).lock);
  const nowhere = join(dir, 'none', 'lock');
  const missing = { message: `IO: ${nowhere}: cannot be opened (No such file or directory)`, errno: 2 };
  await expect(native.fileLock(files, nowhere)).rejects.toMatchObject(missing);
  expect(thrownBy(() => native.lockFile(nowhere))).toMatchObject(missing);
  await expect(native.fileIdentity(files, join(path, 'below'))).rejects.toMatchObject({ errno: 20 });
});

function thrownBy(work: () => unknown): unknown {
  try {
    work();
  } catch (error) {
    return error;
  }
  throw new Error('nothing was thrown');
}

it('says why not, with the number of the error', async () => {
  const none = join(dir, 'none');
  for (const failing of [
    native.fileRead(files, none, 0, 1),
    native.fileWrite(files, none, Float64Array.of(0), Buffer.alloc(1)),
    native.fileNames(files, none),
    native.fileRename(files, none, `${none}2`),
    native.fileMake(files, join(none, 'x'), Buffer.alloc(1)),
  ]) {
    await expect(failing).rejects.toMatchObject({ message: expect.stringMatching(/^IO: .*No such file/), errno: 2 });
  }
  writeFileSync(none, '');
  await expect(native.fileFolder(files, join(none, 'x'), true)).rejects.toMatchObject({ errno: 20 });
  expect(() => native.fileWrite(files, none, Float64Array.of(0, 1), Buffer.alloc(3))).toThrow(/pieces of one size/);
  expect(() => native.fileRead(files, none, -1, 1)).toThrow(RangeError);
  native.filesClose(files);
  expect(() => native.fileRead(files, none, 0, 1)).toThrow(/closed/);
  files = native.filesOpen();
});

it('calls that hang on eight devices stop neither verification, nor codecs, names, files, nor a ninth device', async () => {
  const arena = native.arenaCreate(join(dir, 'arena'), 1 << 20, 1);
  const fifo = join(dir, 'fifo');
  execFileSync('mkfifo', [fifo]);
  const devices = Array.from({ length: 8 }, () => native.filesOpen());
  let ended = 0;
  // open(2) of a pipe that nobody writes to.
  const hanging = devices.map(async (device) => {
    await expect(native.fileRead(device, fifo, 0, 1)).rejects.toThrow(/Illegal seek/);
    ended++;
  });
  const [sum] = await native.arenaChecksum(arena, Float64Array.of(4096), 4096);
  expect(sum).toBe(native.xxh3_64(Buffer.alloc(4096)));
  const faults = await native.arenaVerify(arena, Float64Array.of(4096), Float64Array.of(4096), Buffer.alloc(64));
  expect([...faults]).toEqual([1]);
  expect(await native.arenaSplitPlanes(arena, 4096, 8, 2)).toEqual(Buffer.alloc(8));
  expect((await lookup('localhost')).address).toMatch(/^(127\.0\.0\.1|::1)$/);
  expect(await readFile('/proc/self/stat', 'latin1')).toMatch(/^\d+ /);
  await native.filePrepare(files, join(dir, 'healthy'), 4096);
  expect(ended).toBe(0);
  // Let them go: a writer comes, and stays until the last of them, however late its thread began, has been there.
  const writer = await open(fifo, 'w');
  await Promise.all(hanging);
  await writer.close();
  expect(ended).toBe(8);
  for (const device of devices) native.filesClose(device);
  native.arenaClose(arena);
});

it('verification, copies and codecs go on while every thread of libuv hangs', async () => {
  const arena = native.arenaCreate(join(dir, 'arena'), 1 << 20, 1);
  const fifo = join(dir, 'fifo');
  execFileSync('mkfifo', [fifo]);
  const hanging = Array.from({ length: 8 }, () => open(fifo, 'r'));
  const [slot, target] = [Float64Array.of(4096), Float64Array.of(8192)];
  expect([...(await native.arenaVerify(arena, slot, slot, Buffer.alloc(64)))]).toEqual([1]);
  expect([...(await native.arenaChecksum(arena, slot, 8))]).toEqual([native.xxh3_64(Buffer.alloc(8))]);
  await native.arenaCopy(arena, slot, target, 4096);
  await native.arenaJoinPlanes(arena, 4096, [await native.arenaSplitPlanes(arena, 4096, 8, 2), Buffer.alloc(8)]);
  await native.filePrepare(files, join(dir, 'prepared'), 4096);
  const writer = openSync(fifo, 'r+'); // a pipe's other end, without waiting
  for (const handle of await Promise.all(hanging)) await handle.close();
  closeSync(writer);
  native.arenaClose(arena);
});

it('a process whose call hangs ends when it is told to', () => {
  execFileSync('mkfifo', [join(dir, 'fifo')]);
  const program = `
    import { native } from ${JSON.stringify(new URL('./index.ts', import.meta.url).href)};
    const files = native.filesOpen();
    native.fileRead(files, ${JSON.stringify(join(dir, 'fifo'))}, 0, 1);
    setTimeout(() => process.exit(7), 100);`;
  writeFileSync(join(dir, 'hangs.mjs'), program);
  const run = (): unknown =>
    execFileSync(process.execPath, ['--import', import.meta.resolve('tsx'), join(dir, 'hangs.mjs')], {
      timeout: 20_000,
      stdio: 'pipe',
    });
  expect(run).toThrow(expect.objectContaining({ status: 7, signal: null }));
});
