/**
 * Recovery: what the folder of segments holds, after a clean close or a SIGKILL. Contents come from footers, and for what has
 * none, or an old one, from a walk over the object headers; recency comes from the last checkpoint. Pure reading, apart from
 * the removal of our own leftovers, and nothing blocks the event loop.
 *
 * A page that the device cannot read (EIO) is damage of what it belongs to, and of nothing else: a header costs its segment, a
 * footer is made up for by the walk, a walk ends there. Only where no header at all can be read is it the device that is broken.
 *
 * Invariants: files that are not ours by name are left alone; nothing is listed that its header, generation and checksums do
 * not vouch for (payloads are verified at every read); a later generation wins over an earlier one.
 */
import { Buffer } from 'node:buffer';
import { join } from 'node:path';
import { native } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';
import { decodeHeader, headerBytes, isNewer, sequenceOffset, slotBytesFor } from '@kvtier/identity';
import type { Log } from '@kvtier/runtime';
import { slicing } from '../kit/slices.ts';
import type { DeviceFiles } from './device-files.ts';
import {
  type Checkpoint,
  decodeCheckpoint,
  decodeFooter,
  decodeSegmentHeader,
  type Footer,
  footerBytesOf,
  pageBytes,
  record,
} from './format.ts';

export const segmentName = (id: number): string => `segment-${String(id).padStart(8, '0')}.kvs`;
/** While a file is being prepared. */
export const unfinishedSuffix = '.new';
export const checkpointName = 'checkpoint.kvc';
const windowBytes = 64 << 10;

export interface FoundSegment {
  readonly id: number;
  readonly bytes: number;
  /** 0: never written. */
  readonly generation: number;
}

/** One block; its hash lies in `words` from `at` on, zero padded to 8 words. The same object for each of them. */
export interface FoundBlock {
  words: Uint32Array;
  at: number;
  hashBytes: number;
  /** Digest; the same array for blocks of one footer's namespace. */
  namespace: Uint8Array;
  page: number;
  pages: number;
  hot: boolean;
  /** Recency at the time of the footer; undefined: written after it. */
  lastUse: number | undefined;
  /** `Header.expiresS`. */
  expiresS: number;
}

export interface FoundContents {
  readonly sealed: boolean;
  readonly hasFooter: boolean;
  /** Where the next object would go. */
  readonly tail: number;
}

/** Segments of another version of this program. The device waits, with all that it holds, for one that can read them. */
export class ForeignSegments extends KvError {
  constructor(path: string, version: number) {
    const line = `${path}: a segment of version ${version}, of another version of kvtier; update back, or remove the segments' folder`;
    super('IO', line, { retry: true, tier: 'disk' });
  }
}

/**
 * All segments, by generation. @throws ForeignSegments where there is one of another version, before anything is removed; what reading
 * the first header said, where there are several and none can be read.
 */
export async function findSegments(dir: string, files: DeviceFiles, log: Log): Promise<FoundSegment[]> {
  const segments: FoundSegment[] = [];
  const leftovers: string[] = [];
  const damaged: string[] = [];
  const unreadable: unknown[] = [];
  for (const name of await files.run((handle) => native.fileNames(handle, dir))) {
    if (/^(segment-\d{8}\.kvs|checkpoint\.kvc|probe)\.new$/.test(name)) leftovers.push(join(dir, name));
    const match = /^segment-(\d{8})\.kvs$/.exec(name);
    if (match === null) continue;
    const path = join(dir, name);
    const id = Number(match[1]);
    const bytes = await files.run((handle) => native.fileBytes(handle, path));
    const page = bytes < pageBytes ? Buffer.alloc(0) : await readAt(files, path, 0, pageBytes).catch(bad(unreadable));
    const header = decodeSegmentHeader(page);
    if (header !== undefined && 'version' in header) throw new ForeignSegments(path, header.version);
    const isWhole = header?.id === id && header.bytes === bytes;
    if (isWhole) segments.push({ id, bytes, generation: header.generation });
    else damaged.push(path);
  }
  for (const path of leftovers) await files.run((handle) => native.fileRemove(handle, path));
  // Nothing is removed for a device that reads nothing: it may be well again, with all that it holds.
  if (segments.length === 0 && unreadable.length > 1) throw unreadable[0];
  for (const path of damaged) {
    log.warn({ path }, 'a segment is damaged (header or size); its blocks are lost and the file is made anew');
    await files.run((handle) => native.fileRemove(handle, path));
  }
  return segments.sort((a, b) => a.generation - b.generation || a.id - b.id);
}

/** The recency that the last checkpoint knew; undefined: there is none that can be read. One never has more than `maxBytes`. */
export async function readCheckpoint(
  dir: string,
  files: DeviceFiles,
  maxBytes: number,
  log: Log,
): Promise<Checkpoint | undefined> {
  const path = join(dir, checkpointName);
  const size = await files.run((handle) => native.fileBytes(handle, path));
  if (size < 0) return undefined;
  const bytes = size > maxBytes ? Buffer.alloc(0) : await readAt(files, path, 0, size).catch(bad());
  const checkpoint = decodeCheckpoint(bytes);
  if (checkpoint === undefined) log.warn({ path }, 'the checkpoint is damaged; recency is that of the places instead');
  return checkpoint;
}

/** Calls `list` for every block of a segment, by place. One with a page that cannot be read, or a newer program's object, counts as sealed: nothing goes there. */
export async function recoverContents(
  dir: string,
  files: DeviceFiles,
  { id, bytes, generation }: FoundSegment,
  list: (block: FoundBlock) => void,
): Promise<FoundContents> {
  const read: Reading = (position, count) => readAt(files, join(dir, segmentName(id)), position, count);
  const unreadable: unknown[] = [];
  const footer = await readFooter(read, bytes, unreadable);
  const isOurs = footer?.id === id && footer.generation === generation;
  if (isOurs) await listRecords(footer, bytes / pageBytes, list);
  if (isOurs && footer.sealed) return { sealed: true, hasFooter: true, tail: footer.tail };
  const { tail, isForeign } = await scan(read, isOurs ? footer.tail : pageBytes, bytes, generation, list, unreadable);
  return { sealed: unreadable.length > 0 || isForeign, hasFooter: isOurs, tail };
}

/** Engines are served meanwhile: no more than a slice of blocks in one turn. */
async function listRecords(
  { namespaces, records }: Footer,
  segmentPages: number,
  list: (block: FoundBlock) => void,
): Promise<void> {
  const { words, doubles, count } = records;
  const block = blockIn(words);
  for (let i = 0, at = 0; i < count; i++, at += record.words) {
    if (i > 0 && i % slicing.blocks === 0) await new Promise<void>((resolve) => void setImmediate(resolve));
    const namespace = namespaces[words[at + record.namespace]!];
    const page = words[at + record.page]!;
    const pages = words[at + record.pages]!;
    if (namespace === undefined || page === 0 || pages === 0 || page + pages > segmentPages) continue;
    block.at = at;
    block.hashBytes = words[at + record.kind]! & record.hashBytesMask;
    block.namespace = namespace;
    block.page = page;
    block.pages = pages;
    block.hot = (words[at + record.kind]! & record.hotBit) !== 0;
    block.lastUse = doubles[i * record.doubles + record.lastUse]!;
    block.expiresS = words[at + record.expires]!;
    list(block);
  }
}

const blockIn = (words: Uint32Array): FoundBlock => ({
  ...{
    words,
    at: 0,
    hashBytes: 0,
    namespace: new Uint8Array(0),
    page: 0,
    pages: 0,
    hot: false,
    lastUse: undefined,
    expiresS: 0,
  },
});

/** Bytes of one file: position, count. */
type Reading = (position: number, bytes: number) => Promise<Buffer>;

async function readFooter(read: Reading, bytes: number, unreadable: unknown[]): Promise<Footer | undefined> {
  const footerBytes = footerBytesOf(await read(bytes - pageBytes, pageBytes).catch(bad(unreadable)));
  if (footerBytes === undefined || footerBytes > bytes - pageBytes) return undefined;
  return decodeFooter(await read(bytes - footerBytes, footerBytes).catch(bad(unreadable)));
}

/**
 * Walk the objects of a segment without a footer of all of them, up to the first header that is not of this generation, or
 * cannot be read: `tail`. `isForeign`: what lies there is a newer program's, of this generation, and more of it may follow.
 */
async function scan(
  read: Reading,
  from: number,
  bytes: number,
  generation: number,
  list: (block: FoundBlock) => void,
  unreadable: unknown[],
): Promise<{ readonly tail: number; readonly isForeign: boolean }> {
  const name = Buffer.from(new ArrayBuffer(32));
  const block = blockIn(new Uint32Array(name.buffer));
  let window: Buffer = Buffer.alloc(0);
  let windowAt = 0;
  for (let at = from; ; ) {
    if (at < windowAt || at + headerBytes > windowAt + window.length) {
      window = await read(at, Math.min(windowBytes, bytes - at)).catch(bad(unreadable));
      // The walk goes on over what is bad in a payload: that costs its block alone, when it is read.
      if (window.length === 0 && at < bytes) window = await read(at, pageBytes).catch(bad(unreadable));
      windowAt = at;
      if (window.length < headerBytes) return { tail: at, isForeign: false };
    }
    const bytesOfHeader = window.subarray(at - windowAt, at - windowAt + headerBytes);
    const header = decodeHeader(bytesOfHeader);
    if ('error' in header) {
      // One of a former life of the segment is in nobody's way, whoever wrote it: a segment is not cleared when it is used anew.
      const isOfThisLife = bytesOfHeader.readBigUInt64LE(sequenceOffset) === BigInt(generation);
      return { tail: at, isForeign: header.error === 'version' && isOfThisLife };
    }
    if (header.sequence !== generation) return { tail: at, isForeign: false };
    const objectBytes = slotBytesFor(header.payloadBytes);
    if (at + objectBytes > bytes) return { tail: at, isForeign: false };
    // Listed, what this program cannot read could take the place of a copy that it can: nothing tells which of them is older.
    if (!isNewer(header) && !header.namespace.every((byte) => byte === 0)) {
      name.fill(0).write(header.hash, 'latin1');
      block.hashBytes = header.hash.length;
      block.namespace = header.namespace;
      block.page = at / pageBytes;
      block.pages = objectBytes / pageBytes;
      block.expiresS = header.expiresS;
      list(block);
    } // else it is stepped over, or was removed
    at += objectBytes;
  }
}

const readAt = (files: DeviceFiles, path: string, position: number, bytes: number): Promise<Buffer> =>
  bytes <= 0 ? Promise.resolve(Buffer.alloc(0)) : files.run((handle) => native.fileRead(handle, path, position, bytes));

const eio = 5;

/** The device answers, and cannot read what was asked for. */
export const isUnreadable = (error: unknown): boolean => (error as { errno?: number }).errno === eio;

/** For `catch`: what cannot be read is like an empty file, and told in `unreadable`. Else the error goes on. */
const bad =
  (unreadable: unknown[] = []) =>
  (error: unknown): Buffer => {
    if (!isUnreadable(error)) throw error;
    unreadable.push(error);
    return Buffer.alloc(0);
  };
