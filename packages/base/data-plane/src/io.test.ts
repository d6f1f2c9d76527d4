/** The native arena and I/O queue: bounds, both backends, coalescing and splitting, verification, ends of files. */
import { randomBytes } from 'node:crypto';
import { mkdtempSync, readFileSync, rmSync, statSync, truncateSync, writeFileSync } from 'node:fs';
import { createConnection, createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { type ArenaHandle, type IoHandle, native } from './index.ts';

const page = 4096;
const arenaBytes = 16 << 20;
let dir: string;
let arena: ArenaHandle;

beforeEach(() => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-io-'));
  arena = native.arenaCreate(join(dir, 'arena'), arenaBytes, 2);
});
afterEach(() => {
  native.arenaClose(arena);
  rmSync(dir, { recursive: true });
});

describe('arena', () => {
  it('is private, has its size, and maps again only as what it is', () => {
    const path = join(dir, 'arena');
    expect(statSync(path).mode & 0o777).toBe(0o600);
    expect(statSync(path).size).toBe(arenaBytes);
    const id = native.arenaId(arena);
    const again = native.arenaOpen(path, arenaBytes, id);
    native.arenaWrite(arena, page, Buffer.from('seen by both'));
    expect(native.arenaRead(again, page, 12).toString()).toBe('seen by both');
    native.arenaClose(again);
    expect(() => native.arenaOpen(path, arenaBytes, id + 1n)).toThrow(/^PROTOCOL: .*another node's arena/);
    expect(() => native.arenaOpen(path, arenaBytes - page, id)).toThrow(/^PROTOCOL: .*size/);
    expect(() => native.arenaCreate(path, arenaBytes, 1)).toThrow(/^SETUP: .*exists/);
  });

  it('refuses every access outside of it, and its header', () => {
    expect(() => native.arenaRead(arena, 0, 16)).toThrow(RangeError);
    expect(() => native.arenaRead(arena, arenaBytes - 8, 16)).toThrow(RangeError);
    expect(() => native.arenaRead(arena, -page, 16)).toThrow(RangeError);
    expect(() => native.arenaRead(arena, Number.NaN, 16)).toThrow(RangeError);
    expect(() => native.arenaWrite(arena, arenaBytes, Buffer.alloc(1))).toThrow(RangeError);
    expect(() => native.arenaCopy(arena, Float64Array.of(page), Float64Array.of(arenaBytes - page), 2 * page)).toThrow(
      RangeError,
    );
  });

  it('says how much space is missing when it cannot be reserved, and leaves no file', () => {
    expect(() => native.arenaCreate('/dev/shm/kvtier-test-too-big', 2 ** 46, 1)).toThrow(/^CAPACITY: .*no space/);
    expect(() => statSync('/dev/shm/kvtier-test-too-big')).toThrow(/ENOENT/);
  });

  it.each(['fits', 'does not fit'])('is mapped where huge pages can lie, whether its size %s them', (what) => {
    const path = join(dir, 'huge');
    const bytes = (4 << 20) + (what === 'fits' ? 0 : page);
    const mapped = native.arenaCreate(path, bytes, 2);
    const again = native.arenaOpen(path, bytes, native.arenaId(mapped));
    const maps = readFileSync('/proc/self/maps', 'utf8').split('\n');
    const starts = maps.filter((line) => line.endsWith(path)).map((line) => Number.parseInt(line, 16) % (2 << 20));
    expect(starts).toEqual([0, 0]);
    for (const each of [mapped, again]) native.arenaClose(each);
    const left = readFileSync('/proc/self/maps', 'utf8');
    expect(left).not.toContain(path);
  });

  it('copies and sums off the thread', async () => {
    const bytes = randomBytes(3 * page);
    native.arenaWrite(arena, page, bytes);
    await native.arenaCopy(arena, Float64Array.of(page, page), Float64Array.of(1 << 20, 2 << 20), bytes.length);
    expect(native.arenaRead(arena, 2 << 20, bytes.length)).toEqual(bytes);
    const sums = await native.arenaChecksum(arena, Float64Array.of(page, 1 << 20), bytes.length);
    expect([...sums]).toEqual([native.xxh3_64(bytes), native.xxh3_64(bytes)]);
  });
});

describe.each(['io_uring', 'threads'] as const)('I/O by %s', (backend) => {
  let io: IoHandle;
  let waiting: Map<number, (result: number) => void>;

  beforeEach((context) => {
    waiting = new Map();
    const onComplete = (tags: Float64Array, results: Float64Array) => {
      tags.forEach((tag, i) => {
        waiting.get(tag)!(results[i]!);
        waiting.delete(tag);
      });
    };
    try {
      io = native.ioOpen(arena, { backend, depth: 4, ioBytes: 64 << 10 }, onComplete);
    } catch (error) {
      console.warn(`SKIPPED: ${backend} is not tested here: ${(error as Error).message}`);
      context.skip();
    }
  });

  /** Rows [kind, file, fileOffset, arenaOffset, bytes]; their results in order. */
  function submit(rows: number[][], identities?: Uint8Array): Promise<number[]> {
    const results = rows.map((_, tag) => new Promise<number>((resolve) => waiting.set(tag, resolve)));
    native.ioSubmit(io, Float64Array.from(rows.flatMap((row, tag) => [tag, ...row])), identities);
    return Promise.all(results);
  }

  it('moves what rows say: adjacent, scattered, larger than one I/O', async () => {
    expect(native.ioBackend(io).backend).toBe(backend);
    const file = native.ioOpenFile(io, join(dir, 'data'), { create: true, bytes: 4 << 20 });
    const sizes = [1, 2, 40, 1, 1, 300, 7].map((pages) => pages * page);
    const content = sizes.map((bytes) => randomBytes(bytes));
    let fileOffset = 0;
    let arenaOffset = page;
    const rows = sizes.map((bytes, i) => {
      native.arenaWrite(arena, arenaOffset, content[i]!);
      const row = [1, file, fileOffset, arenaOffset, bytes];
      fileOffset += bytes;
      arenaOffset += bytes + (i % 2) * page; // some neighbours in the file are not neighbours in the arena
      return row;
    });
    expect(await submit(rows)).toEqual(sizes);
    expect(readFileSync(join(dir, 'data')).subarray(0, fileOffset).equals(Buffer.concat(content))).toBe(true);

    const target = 8 << 20;
    const back = rows.map(([, , from, to, bytes]) => [0, file, from!, to! + target, bytes!]).reverse();
    expect(await submit(back)).toEqual([...sizes].reverse());
    for (const [i, row] of rows.entries()) {
      expect(native.arenaRead(arena, row[3]! + target, sizes[i]!).equals(content[i]!)).toBe(true);
    }
    await native.ioClose(io);
  });

  it('stamps an object on its way: the slot never changes, and what is read back says 0 again', async () => {
    const pages = [1, 2, 16, 17, 40]; // below, at and above the size of one I/O
    const file = native.ioOpenFile(io, join(dir, 'stamped'), { create: true, bytes: 128 * page });
    const identities = Buffer.alloc(pages.length * 64);
    const stamps = Buffer.alloc(pages.length * 64);
    const objects: Buffer[] = [];
    let at = 0;
    const rows = pages.map((count, i) => {
      const object = randomBytes(count * page);
      Buffer.from('KVTIEROB\x01\x00\x00\x01\x20\x00\x00\x00', 'latin1').copy(object);
      object.fill(0, 80, 248); // no parent, no codec, no sequence
      object.writeBigUInt64LE(BigInt(count * page - 256), 120);
      object.writeBigUInt64LE(native.xxh3_64(object.subarray(256)), 136);
      object.writeBigUInt64LE(native.xxh3_64(object.subarray(0, 248)), 248);
      object.copy(identities, i * 64, 16, 80);
      stamps.writeBigUInt64LE(BigInt(i + 7), i * 64);
      native.arenaWrite(arena, page + at, object);
      objects.push(object);
      const row = [3, file, at, page + at, count * page];
      at += count * page;
      return row;
    });
    const slots = (from: number): Buffer => native.arenaRead(arena, from, at);
    const written = submit(rows, stamps);
    expect(slots(page).equals(Buffer.concat(objects))).toBe(true);
    expect(await written).toEqual(pages.map((count) => count * page));
    expect(slots(page).equals(Buffer.concat(objects))).toBe(true);
    const stored = readFileSync(join(dir, 'stamped'));
    for (const [i, [, , offset]] of rows.entries()) expect(stored.readBigUInt64LE(offset! + 128)).toBe(BigInt(i + 7));
    const back = rows.map(([, , offset, slot, bytes]) => [2, file, offset!, slot! + (8 << 20), bytes!]);
    expect(await submit(back, identities)).toEqual(pages.map((count) => count * page));
    expect(slots(page + (8 << 20)).equals(Buffer.concat(objects))).toBe(true);
    await native.ioClose(io);
  });

  it('opens and closes files on the thread of their device', async () => {
    const files = native.filesOpen();
    writeFileSync(join(dir, 'taken'), Buffer.alloc(page, 7));
    const file = await native.ioTakeFile(io, files, join(dir, 'taken'));
    expect(await submit([[0, file, 0, page, page]])).toEqual([page]);
    expect(native.arenaRead(arena, page, 2)).toEqual(Buffer.of(7, 7));
    native.ioCloseFile(io, file, files);
    expect(() => submit([[0, file, 0, page, page]])).toThrow(/no such file/);
    const failed = await native.ioTakeFile(io, files, join(dir, 'none')).catch((error) => error);
    expect(failed).toMatchObject({ message: expect.stringMatching(/^IO: .*No such file/), errno: 2 });
    native.filesClose(files);
    await native.ioClose(io);
  });

  it('reports short reads at the end of a file, and errors of the system', async () => {
    const path = join(dir, 'short');
    const file = native.ioOpenFile(io, path, { create: true, bytes: 16 * page });
    truncateSync(path, 6 * page);
    const rows = [0, 4, 8].map((at) => [0, file, at * page, page + at * page, 4 * page]);
    expect(await submit(rows)).toEqual([4 * page, 2 * page, 0]);
    native.ioCloseFile(io, file);
    expect(() => submit([[0, file, 0, page, page]])).toThrow(/no such file/);
    expect(() => native.ioOpenFile(io, join(dir, 'none'), { create: false, bytes: 0 })).toThrow(/^IO: .*No such file/);
    await native.ioClose(io);
  });

  it('refuses rows that would touch memory outside the arena', async () => {
    const file = native.ioOpenFile(io, join(dir, 'bounds'), { create: true, bytes: 16 * page });
    const bad = [
      [0, file, 0, 0, page],
      [0, file, 0, arenaBytes, page],
      [0, file, 0, arenaBytes - page, 2 * page],
      [0, file, 1, page, page],
      [0, file, 0, page + 8, page],
      [0, file, 0, page, 0],
      [0, file, 0, page, 2 ** 60],
      [0, file, 0, Number.NaN, page],
      [2, file, 0, page, page],
      [3, file, 0, page, page],
    ];
    for (const row of bad) expect(() => native.ioSubmit(io, Float64Array.from([0, ...row])), `${row}`).toThrow();
    await native.ioClose(io);
    expect(() => native.ioBackend(io)).toThrow(/closed/);
  });

  it('completes everything before it closes', async () => {
    const file = native.ioOpenFile(io, join(dir, 'many'), { create: true, bytes: 4 << 20 });
    const results = submit(Array.from({ length: 500 }, (_, i) => [1, file, ((i * 7) % 512) * page, page, page]));
    await native.ioClose(io);
    expect(await results).toEqual(Array.from({ length: 500 }, () => page));
  });
});

describe('files', () => {
  const files = native.filesOpen();
  it('locks once, naming the holder, and again after unlock', () => {
    const path = join(dir, 'lock');
    const lock = native.lockFile(path);
    expect(() => native.lockFile(path)).toThrow(`LOCKED: ${path}: held by process ${process.pid}`);
    native.unlock(lock);
    native.unlock(native.lockFile(path));
  });

  it('prepares a file of zeros, or says why not', async () => {
    const path = join(dir, 'prepared');
    await native.filePrepare(files, path, (5 << 20) + page);
    expect(readFileSync(path).equals(Buffer.alloc((5 << 20) + page))).toBe(true);
    await expect(native.filePrepare(files, path, page)).rejects.toThrow(/^IO: .*exists/);
    await expect(native.filePrepare(files, join(dir, 'huge'), 2 ** 45)).rejects.toThrow(/^IO: .*no space/);
    expect(() => statSync(join(dir, 'huge'))).toThrow(/ENOENT/);
    writeFileSync(path, '');
  });

  it('names the process at the other end of a socket', async () => {
    const server = createServer().listen(join(dir, 'socket'));
    const client = createConnection(join(dir, 'socket'));
    const peer = await new Promise<import('node:net').Socket>((resolve) => server.once('connection', resolve));
    const { fd } = (peer as unknown as { _handle: { fd: number } })._handle;
    expect(native.peerCredentials(fd)).toEqual({ pid: process.pid, uid: process.getuid!() });
    client.destroy();
    peer.destroy();
    await new Promise((resolve) => server.close(resolve));
  });
});
