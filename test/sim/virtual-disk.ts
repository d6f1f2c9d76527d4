/**
 * Disks in memory, behind the native functions that the disk tier calls: calls to file systems and the I/O engine. They take time,
 * complete out of order, hang, stall (what writes waits, what reads does not), fail (EIO, ENOSPC), flip bits, tear what is written
 * while the power goes, and forget what was not flushed. They count the calls in flight.
 *
 * Invariants: bytes reach a slot of the arena, or leave it, only in the very event that completes the transfer, and until then a
 * read has filled its slot with rubbish: who uses it too early, or gives it away, is found out.
 */

import { type ArenaHandle, type FilesHandle, native } from '@kvtier/data-plane';
import { headerBytes } from '@kvtier/identity';
import { isSound, type VirtualArenas } from './virtual-arena.ts';
import type { Entry, Life, World } from './world.ts';

const pageBytes = 4096;
const identityBytes = 64;
export const simRoot = '/kvtier-sim/';
const flushUs = 300_000;
/** Of all files: nobody removes a world's folders. */
const identity = { device: 1n, inode: 1n };
/** Of the folders above them: what is below is a volume of its own. */
const above = { device: 0n, inode: 1n };

const errors = { EIO: 5, ENOENT: 2, ENOSPC: 28 } as const;

class DiskError extends Error {
  readonly errno: number;
  constructor(code: keyof typeof errors, path: string) {
    super(`IO: ${path}: ${code}`);
    this.errno = errors[code];
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
  /** Nothing that writes ends before. */
  stallsUntilUs = 0;
  /** Files cannot be made while so many bytes are in use. */
  roomBytes = Number.POSITIVE_INFINITY;
  /** Probability that a write into a file that is there finds no space, as on a full copy-on-write or thin volume. */
  refuses = 0;
  /** Probability that an operation fails with EIO; that a read finds a bit flipped. */
  eio = 0;
  flips = 0;
  /** Probability that a read of an object hangs, while those beside it come. */
  stuck = 0;
  readonly counts = { reads: 0, writes: 0, eio: 0, enospc: 0, flips: 0, torn: 0, reverted: 0, stuck: 0 };
  /** Calls to the file system that have not ended, by whose they are; and objects on their way. */
  readonly callsInFlight = new Map<Life, number>();
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

  /** A call to the file system: `fn` runs when it is over; it may fail instead. */
  op<T>(what: string, fn: () => T, writes = false): Promise<T> {
    return this.#call((done) => this.after(what, done, writes), fn);
  }

  after(what: string, fn: (failure: DiskError | undefined) => void, writes = false): Entry {
    const { world } = this;
    const slow = world.chance(0.03) ? world.between(5_000, 60_000) : 0;
    const untilUs = Math.max(this.hangsUntilUs, writes ? this.stallsUntilUs : 0);
    const delayUs = Math.max(untilUs - world.nowUs, 0) + world.between(20, 400) + slow;
    return world.schedule(delayUs, `disk ${what}`, () => {
      // It hangs since this began: it ends when that ends.
      if (this.hangsUntilUs > world.nowUs || (writes && this.stallsUntilUs > world.nowUs)) {
        this.after(what, fn, writes);
        return;
      }
      const fails = this.eio > 0 && world.chance(this.eio);
      if (fails) this.counts.eio++;
      fn(fails ? new DiskError('EIO', what) : undefined);
    });
  }

  /** A call that puts bytes in place when it is over. */
  writeCall(file: VirtualFile, at: number, bytes: Buffer): Promise<void> {
    return this.#call(
      (done) => this.write('write metadata', file, at, [bytes], done),
      () => {},
    );
  }

  async #call<T>(begin: (done: (failure: DiskError | undefined) => void) => void, fn: () => T): Promise<T> {
    const { life } = this.world;
    this.callsInFlight.set(life, (this.callsInFlight.get(life) ?? 0) + 1);
    const failure = await new Promise<DiskError | undefined>(begin);
    this.callsInFlight.set(life, this.callsInFlight.get(life)! - 1);
    if (failure !== undefined) throw failure;
    return fn();
  }

  /** Bytes that will be in the file when the operation is over: taken from the parts of `source` then. */
  write(
    what: string,
    file: VirtualFile,
    at: number,
    source: readonly Buffer[],
    done: (failure: DiskError | undefined) => void,
  ): void {
    this.counts.writes++;
    const apply = (bytes: number): void => {
      for (let from = at - (at % pageBytes); from < at + bytes; from += pageBytes) {
        const page = file.bytes.subarray(from, from + pageBytes);
        this.#unflushed.push({ file, at: from, before: Buffer.from(page) });
      }
      Buffer.concat(source).copy(file.bytes, at, 0, bytes);
    };
    const bytes = source.reduce((sum, { length }) => sum + length, 0);
    const writing = { owner: this.world.life, bytes, apply };
    this.#writing.add(writing);
    const ended = (failure: DiskError | undefined): void => {
      this.#writing.delete(writing);
      if (failure === undefined) apply(bytes);
      done(failure);
    };
    const refused = (failure: DiskError | undefined): void => {
      if (failure !== undefined || this.refuses === 0 || !this.world.chance(this.refuses)) {
        ended(failure);
        return;
      }
      // Some of it may be there.
      this.counts.enospc++;
      const pages = Math.floor((bytes - 1) / pageBytes);
      if (pages > 0 && this.world.chance(0.5)) apply(this.world.between(0, pages) * pageBytes);
      ended(new DiskError('ENOSPC', what));
    };
    this.after(what, refused, true);
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
    this.callsInFlight.delete(owner);
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

  /** What replaces functions of the native binding. */
  readonly native = {
    unlock: (path: string) => void this.of(path).locks.delete(path),
    filesOpen: () => ({}) as FilesHandle,
    filesClose: () => {},
    fileFolder: (_: FilesHandle, path: string) => this.of(path).op('mkdir', () => {}, true),
    fileIdentity: (_: FilesHandle, path: string) =>
      path.length < simRoot.length ? Promise.resolve(above) : this.of(path).op('stat', () => identity),
    fileLock: (_: FilesHandle, path: string) => {
      const disk = this.of(path);
      const { life } = this.#world;
      const lock = () => {
        if (disk.locks.has(path)) throw new Error(`LOCKED: ${path}`);
        disk.locks.set(path, life);
        return { ...identity, lock: path };
      };
      return disk.op('lock', lock, true);
    },
    fileNames: (_: FilesHandle, path: string) => {
      const disk = this.of(path);
      const below = path.endsWith('/') ? path : `${path}/`;
      return disk.op('readdir', () =>
        [...disk.files.keys()].filter((name) => name.startsWith(below)).map((name) => name.slice(below.length)),
      );
    },
    fileBytes: (_: FilesHandle, path: string) =>
      this.of(path).op('stat', () => this.of(path).files.get(path)?.bytes.length ?? -1),
    fileRead: (_: FilesHandle, path: string, position: number, bytes: number) =>
      this.of(path).op('read metadata', () =>
        Buffer.from(
          this.of(path)
            .file(path)
            .bytes.subarray(position, position + bytes),
        ),
      ),
    fileWrite: async (_: FilesHandle, path: string, positions: Float64Array, given: Uint8Array, padded = 0) => {
      const disk = this.of(path);
      const bytes = Buffer.from(given);
      const file = disk.file(path);
      const piece = bytes.length / positions.length;
      // One after another, as in one thread.
      for (const [at, position] of positions.entries()) {
        const zeros = Buffer.alloc(Math.max(0, padded - piece));
        await disk.writeCall(file, position, Buffer.concat([bytes.subarray(at * piece, (at + 1) * piece), zeros]));
      }
    },
    fileMake: (_: FilesHandle, path: string, bytes: Uint8Array) => {
      const disk = this.of(path);
      const make = (): void => {
        disk.make(path, bytes.length);
        Buffer.from(bytes).copy(disk.file(path).bytes);
      };
      return disk.op('make', make, true);
    },
    filePrepare: (_: FilesHandle, path: string, bytes: number) =>
      this.of(path).op('prepare', () => this.of(path).make(path, bytes), true),
    fileRename: (_: FilesHandle, from: string, to: string) => {
      const disk = this.of(from);
      const rename = (): void => {
        disk.files.set(to, disk.file(from));
        disk.files.delete(from);
      };
      return disk.op('rename', rename, true);
    },
    fileRemove: (_: FilesHandle, path: string) =>
      this.of(path).op('rm', () => void this.of(path).files.delete(path), true),
    ioOpen: (handle: ArenaHandle, _options: object, onComplete: Io['onComplete']): Io => ({
      arena: this.#arenas.memories.get(handle)!,
      files: [],
      onComplete,
      gone: false,
    }),
    ioBackend: () => ({ backend: 'threads', reason: 'simulation' }),
    ioTakeFile: (io: Io, _: FilesHandle, path: string) => {
      const disk = this.of(path);
      return disk.op('open', () => io.files.push({ disk, file: disk.file(path) }) - 1);
    },
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
      const header = stamped(view, identity.readBigUInt64LE(0));
      const source = [header, view.subarray(header.length)];
      disk.write('write object', file, offset!, source, (failure) =>
        complete(failure === undefined ? bytes! : -failure.errno),
      );
      return;
    }
    disk.counts.reads++;
    view.fill(0xcd);
    const read = (failure: DiskError | undefined): void => {
      if (failure !== undefined) {
        complete(-5);
        return;
      }
      file.bytes.copy(view, 0, offset!, offset! + bytes!);
      if (disk.flips > 0 && world.chance(disk.flips)) {
        disk.counts.flips++;
        view[world.between(0, view.length - 1)]! ^= 1;
      }
      const sound = isSound(view, identity);
      if (sound) stamped(view, 0n).copy(view);
      complete(sound ? bytes! : -74);
    };
    const begin = (): void => void disk.after('read object', read);
    if (disk.stuck > 0 && world.chance(disk.stuck)) {
      disk.counts.stuck++;
      world.schedule(world.between(50, 3_000) * 1000, 'disk read object hangs', begin);
    } else begin();
  }
}

/** The header in `object` with this sequence. */
function stamped(object: Buffer, sequence: bigint): Buffer {
  const header = Buffer.from(object.subarray(0, headerBytes));
  header.writeBigUInt64LE(sequence, 128);
  header.writeBigUInt64LE(native.xxh3_64(header.subarray(0, 248)), 248);
  return header;
}
