/**
 * Disks in memory, behind the functions of node:fs/promises and of the native I/O engine that the disk tier calls. They take time,
 * complete out of order, hang, fail (EIO, ENOSPC), flip bits, tear what is written while the power goes, and forget what was not
 * flushed.
 *
 * Invariants: bytes reach a slot of the arena, or leave it, only in the very event that completes the transfer, and until then a
 * read has filled its slot with rubbish: who uses it too early, or gives it away, is found out.
 */
import fsPromises from 'node:fs/promises';
import { type ArenaHandle, native } from '../../packages/native/src/index.ts';
import { isSound, type VirtualArenas } from './virtual-arena.ts';
import type { Entry, Life, World } from './world.ts';

const pageBytes = 4096;
const identityBytes = 64;
export const simRoot = '/kvtier-sim/';
const flushUs = 300_000;

class DiskError extends Error {
  readonly code: string;
  constructor(code: string, path: string) {
    super(`${code}: ${path}`);
    this.code = code;
  }
}

interface VirtualFile {
  bytes: Buffer;
}

/** A write that has begun; `apply` puts its first so many bytes in place. */
interface Writing {
  readonly owner: Life;
  readonly bytes: number;
  readonly apply: (bytes: number) => void;
}

export class VirtualDisk {
  readonly world: World;
  readonly files = new Map<string, VirtualFile>();
  readonly locks = new Map<string, Life>();
  /** No operation ends before. */
  hangsUntilUs = 0;
  /** Files cannot be made while so many bytes are in use. */
  roomBytes = Number.POSITIVE_INFINITY;
  /** Probability that an operation fails with EIO; that a read finds a bit flipped. */
  eio = 0;
  flips = 0;
  readonly counts = { reads: 0, writes: 0, eio: 0, enospc: 0, flips: 0, torn: 0, reverted: 0 };
  readonly #writing = new Set<Writing>();
  /** Pages as they were before writes that are not flushed yet, oldest first. */
  #unflushed: { readonly file: VirtualFile; readonly at: number; readonly before: Buffer }[] = [];

  constructor(world: World) {
    this.world = world;
    const flush = (): void => {
      this.#unflushed = [];
      world.schedule(flushUs, 'disk flush', flush, world.servers);
    };
    world.schedule(flushUs, 'disk flush', flush, world.servers);
  }

  get bytes(): number {
    let bytes = 0;
    for (const file of this.files.values()) bytes += file.bytes.length;
    return bytes;
  }

  /** `fn` runs when the operation is over; it may fail instead. */
  op<T>(what: string, fn: () => T): Promise<T> {
    return new Promise((resolve, reject) => {
      this.after(what, (failure) => {
        if (failure !== undefined) {
          reject(failure);
          return;
        }
        try {
          resolve(fn());
        } catch (error) {
          reject(error);
        }
      });
    });
  }

  after(what: string, fn: (failure: DiskError | undefined) => void): Entry {
    const { world } = this;
    const slow = world.chance(0.03) ? world.between(5_000, 60_000) : 0;
    const delayUs = Math.max(this.hangsUntilUs - world.nowUs, 0) + world.between(20, 400) + slow;
    return world.schedule(delayUs, `disk ${what}`, () => {
      // It hangs since this began: it ends when that ends.
      if (this.hangsUntilUs > world.nowUs) {
        this.after(what, fn);
        return;
      }
      const fails = this.eio > 0 && world.chance(this.eio);
      if (fails) this.counts.eio++;
      fn(fails ? new DiskError('EIO', what) : undefined);
    });
  }

  /** Bytes that will be in the file when the operation is over: taken from `source` then. */
  write(
    what: string,
    file: VirtualFile,
    at: number,
    source: Buffer,
    done: (failure: DiskError | undefined) => void,
  ): void {
    this.counts.writes++;
    const apply = (bytes: number): void => {
      for (let from = at - (at % pageBytes); from < at + bytes; from += pageBytes) {
        const page = file.bytes.subarray(from, from + pageBytes);
        this.#unflushed.push({ file, at: from, before: Buffer.from(page) });
      }
      source.copy(file.bytes, at, 0, bytes);
    };
    const writing = { owner: this.world.life, bytes: source.length, apply };
    this.#writing.add(writing);
    this.after(what, (failure) => {
      this.#writing.delete(writing);
      if (failure === undefined) apply(source.length);
      done(failure);
    });
  }

  make(path: string, bytes: number): void {
    if (this.bytes + bytes > this.roomBytes) {
      this.counts.enospc++;
      throw new DiskError('ENOSPC', path);
    }
    this.files.set(path, { bytes: Buffer.alloc(bytes) });
  }

  file(path: string): VirtualFile {
    const file = this.files.get(path);
    if (file === undefined) throw new DiskError('ENOENT', path);
    return file;
  }

  /** A bit of some file is not any more what was written. */
  flipAtRest(): void {
    const files = [...this.files.values()].filter(({ bytes }) => bytes.length > 0);
    if (files.length === 0) return;
    const { bytes } = this.world.pick(files);
    const at = this.world.between(0, bytes.length - 1);
    bytes[at]! ^= 1 << this.world.between(0, 7);
    this.counts.flips++;
  }

  /** Whoever used the disk is gone. What was being written is there, or not, or in part; `power`: what was not flushed, too. */
  crash(owner: Life, power: boolean): void {
    const { world } = this;
    for (const writing of this.#writing) {
      if (writing.owner !== owner) continue;
      this.#writing.delete(writing);
      const pages = Math.ceil(writing.bytes / pageBytes);
      const kept = Math.min(writing.bytes, world.between(0, pages) * pageBytes);
      if (kept > 0 && kept < writing.bytes) this.counts.torn++;
      writing.apply(kept);
    }
    for (const [path, holder] of this.locks) if (holder === owner) this.locks.delete(path);
    if (!power) return;
    const settled = new Map<VirtualFile, Set<number>>();
    for (const { file, at, before } of this.#unflushed.reverse()) {
      const pages = settled.get(file) ?? new Set();
      settled.set(file, pages);
      if (pages.has(at)) continue;
      if (world.chance(0.5)) pages.add(at);
      else {
        before.copy(file.bytes, at);
        this.counts.reverted++;
      }
    }
    this.#unflushed = [];
  }
}

interface Io {
  readonly arena: Buffer;
  readonly files: { disk: VirtualDisk; file: VirtualFile }[];
  readonly onComplete: (tags: Float64Array, results: Float64Array) => void;
  gone: boolean;
}

/** All disks of a world, by the first folder below `simRoot`. */
export class VirtualDisks {
  readonly disks = new Map<string, VirtualDisk>();
  readonly #arenas: VirtualArenas;
  readonly #world: World;

  constructor(world: World, arenas: VirtualArenas) {
    this.#world = world;
    this.#arenas = arenas;
  }

  of(path: string): VirtualDisk {
    const name = path.slice(simRoot.length).split('/')[0]!;
    let disk = this.disks.get(name);
    if (disk === undefined) {
      disk = new VirtualDisk(this.#world);
      this.disks.set(name, disk);
    }
    return disk;
  }

  /** What replaces node:fs/promises, for paths below `simRoot`. */
  readonly fileSystem = forSimulated({
    mkdir: async () => undefined,
    open: (path: string) =>
      this.of(path).op('open', () => {
        const disk = this.of(path);
        const file = disk.file(path);
        return {
          stat: () => disk.op('stat', () => ({ size: file.bytes.length })),
          read: (out: Buffer, offset: number, length: number, position: number) =>
            disk.op('read metadata', () => ({
              bytesRead: file.bytes.copy(out, offset, position, Math.min(position + length, file.bytes.length)),
            })),
          write: (bytes: Buffer, offset: number, length: number, position: number) =>
            new Promise<void>((resolve, reject) => {
              disk.write('write metadata', file, position, bytes.subarray(offset, offset + length), (failure) =>
                failure === undefined ? resolve() : reject(failure),
              );
            }),
          close: async () => {},
        };
      }),
    rename: (from: string, to: string) => {
      const disk = this.of(from);
      return disk.op('rename', () => {
        disk.files.set(to, disk.file(from));
        disk.files.delete(from);
      });
    },
    rm: (path: string, options?: { force?: boolean }) => {
      const disk = this.of(path);
      return disk.op('rm', () => {
        if (options?.force !== true) disk.file(path);
        disk.files.delete(path);
      });
    },
    readdir: (path: string) => {
      const disk = this.of(path);
      const below = path.endsWith('/') ? path : `${path}/`;
      return disk.op('readdir', () =>
        [...disk.files.keys()].filter((name) => name.startsWith(below)).map((name) => name.slice(below.length)),
      );
    },
    readFile: (path: string) => {
      const disk = this.of(path);
      return disk.op('readFile', () => Buffer.from(disk.file(path).bytes));
    },
    writeFile: (path: string, bytes: Buffer) => {
      const disk = this.of(path);
      return disk.op('writeFile', () => {
        disk.make(path, bytes.length);
        bytes.copy(disk.file(path).bytes);
      });
    },
  });

  /** What replaces functions of the native binding. */
  readonly native = {
    lockFile: (path: string) => {
      const { locks } = this.of(path);
      if (locks.has(path)) throw new Error(`LOCKED: ${path}`);
      locks.set(path, this.#world.life);
      return path;
    },
    unlock: (path: string) => void this.of(path).locks.delete(path),
    prepareFile: (path: string, bytes: number) => {
      const disk = this.of(path);
      return disk
        .op('prepare', () => disk.make(path, bytes))
        .catch((error: Error) => {
          disk.files.delete(path);
          throw new Error(`IO: ${error.message}`);
        });
    },
    ioOpen: (handle: ArenaHandle, _options: object, onComplete: Io['onComplete']): Io => ({
      arena: this.#arenas.memories.get(handle)!,
      files: [],
      onComplete,
      gone: false,
    }),
    ioBackend: () => ({ backend: 'threads', reason: 'simulation' }),
    ioOpenFile: (io: Io, path: string) => io.files.push({ disk: this.of(path), file: this.of(path).file(path) }) - 1,
    ioCloseFile: () => {},
    ioSubmit: (io: Io, rows: Float64Array, identities: Buffer) => {
      for (let row = 0; row * 6 < rows.length; row++) {
        const identity = Buffer.from(identities.subarray(row * identityBytes, (row + 1) * identityBytes));
        this.#transfer(io, rows.subarray(row * 6, row * 6 + 6), identity);
      }
    },
    ioClose: async (io: Io) => {
      io.gone = true;
    },
    ioAbandon: (io: Io) => {
      io.gone = true;
    },
  };

  #transfer(io: Io, [tag, kind, number, offset, slot, bytes]: Float64Array, identity: Buffer): void {
    const { disk, file } = io.files[number!]!;
    const world = this.#world;
    const view = io.arena.subarray(slot!, slot! + bytes!);
    const complete = (result: number): void => {
      if (!io.gone) io.onComplete(Float64Array.of(tag!), Float64Array.of(result));
    };
    if (kind === 3) {
      view.writeBigUInt64LE(identity.readBigUInt64LE(0), 128); // the sequence
      view.writeBigUInt64LE(native.xxh3_64(view.subarray(0, 248)), 248);
      disk.write('write object', file, offset!, view, (failure) => complete(failure === undefined ? bytes! : -5));
      return;
    }
    disk.counts.reads++;
    view.fill(0xcd);
    disk.after('read object', (failure) => {
      if (failure !== undefined) {
        complete(-5);
        return;
      }
      file.bytes.copy(view, 0, offset!, offset! + bytes!);
      if (disk.flips > 0 && world.chance(disk.flips)) {
        disk.counts.flips++;
        view[world.between(0, view.length - 1)]! ^= 1;
      }
      complete(isSound(view, identity) ? bytes! : -74);
    });
  }
}

/** Functions that take a path first: the simulated ones below `simRoot`, the real ones elsewhere. */
function forSimulated<T extends Record<string, (path: string, ...rest: never[]) => unknown>>(functions: T) {
  const real = fsPromises as unknown as Record<string, (...args: unknown[]) => unknown>;
  return Object.fromEntries(
    Object.entries(functions).map(([name, simulated]) => {
      const original = real[name]!.bind(fsPromises);
      return [
        name,
        (path: unknown, ...rest: never[]) =>
          typeof path === 'string' && path.startsWith(simRoot) ? simulated(path, ...rest) : original(path, ...rest),
      ];
    }),
  );
}
