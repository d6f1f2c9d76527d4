/**
 * The disk tier's formats: segment header, segment footer, checkpoint. Byte tables in docs/formats.md.
 *
 *     0        4096                                   tail             bytes - footerBytes        bytes
 *     ┌────────┬────────┬────────┬─────┬──────────────┬────────────────┬──────────────────────────┐
 *     │ header │ object │ object │ ... │ object       │ (unused)       │ footer, once it is sealed │
 *     └────────┴────────┴────────┴─────┴──────────────┴────────────────┴──────────────────────────┘
 *
 * Invariant: nothing here is trusted without its checksum, and a footer only with its header's generation: what a
 * recycled file still holds of a former generation is not an index of the present one.
 */
import { Buffer } from 'node:buffer';
import { native } from '@kvtier/data-plane';

export const pageBytes = 4096;
const version = 1;
const headerMagic = 'KVTIERSG';
const footerMagic = 'KVTIERSF';
const checkpointMagic = 'KVTIERCP';
const namespaceBytes = 32;
const recordBytes = 64;
const segmentUsesBytes = 24;
const footerVersion = 3;
const checkpointVersion = 2;
/** At the very end of a footer or checkpoint. */
const trailerBytes = 64;

export const pagesUp = (bytes: number): number => Math.ceil(bytes / pageBytes) * pageBytes;

export interface SegmentHeader {
  readonly id: number;
  readonly generation: number;
  readonly bytes: number;
}

/** What a footer says of its segment. */
export interface SegmentTail {
  readonly id: number;
  readonly generation: number;
  readonly sealed: boolean;
  /** Where the next object would begin. */
  readonly tail: number;
}

/**
 * One object of a footer, in 32-bit words: hash, zero padded (0 to 7), page, pages, number in the namespace table, bytes of the
 * hash and above them 1 when hot, then its recency as a float64, then its end (`Header.expiresS`). Offsets and lengths in whole
 * pages.
 */
export const record = {
  ...{ words: recordBytes / 4, page: 8, pages: 9, namespace: 10, kind: 11, expires: 14 },
  ...{ hashBytesMask: 0xff, hotBit: 0x100 },
  /** Counted in float64s. */
  ...{ doubles: recordBytes / 8, lastUse: 6 },
} as const;

/** Records of a footer, as 32-bit words and, over the same bytes, as float64s. Bulk: there may be a million. */
export interface FooterRecords {
  readonly count: number;
  readonly words: Uint32Array;
  readonly doubles: Float64Array;
}

export function emptyRecords(count: number): FooterRecords {
  const doubles = new Float64Array(count * record.doubles);
  return { count, doubles, words: new Uint32Array(doubles.buffer) };
}

/** A footer that verified. */
export interface Footer extends SegmentTail {
  /** Digests, in the order of their numbers. */
  readonly namespaces: readonly Uint8Array[];
  readonly records: FooterRecords;
}

/** Recency of one segment in a checkpoint: its blocks by page. */
export interface SegmentUses {
  readonly id: number;
  readonly generation: number;
  /** Its place in the order of eviction, coldest first. */
  readonly rank: number;
  /** Pairs: page, and twice the age in ticks, plus 1 when it is hot. */
  readonly uses: Uint32Array;
}

export interface Checkpoint {
  readonly tick: number;
  readonly segments: readonly SegmentUses[];
}

/** The first page of a segment. */
export function encodeSegmentHeader(header: SegmentHeader): Buffer {
  const page = Buffer.alloc(pageBytes);
  page.write(headerMagic, 0, 'latin1');
  page.writeUInt32LE(version, 8);
  page.writeUInt32LE(header.id, 12);
  page.writeBigUInt64LE(BigInt(header.bytes), 16);
  page.writeBigUInt64LE(BigInt(header.generation), 24);
  page.writeBigUInt64LE(native.xxh3_64(page.subarray(0, pageBytes - 8)), pageBytes - 8);
  return page;
}

/** Where magic, version and checksum lie stays in every version: so one that is sound is told from damage. */
export interface ForeignSegment {
  readonly version: number;
}

/** undefined when the page is no segment header, or a damaged one; `version`: sound, and of another version than this program's. */
export function decodeSegmentHeader(page: Buffer): SegmentHeader | ForeignSegment | undefined {
  if (page.length < pageBytes || page.toString('latin1', 0, 8) !== headerMagic) return undefined;
  if (native.xxh3_64(page.subarray(0, pageBytes - 8)) !== page.readBigUInt64LE(pageBytes - 8)) return undefined;
  const found = page.readUInt32LE(8);
  if (found !== version) return { version: found };
  return {
    id: page.readUInt32LE(12),
    bytes: Number(page.readBigUInt64LE(16)),
    generation: Number(page.readBigUInt64LE(24)),
  };
}

/** Bytes of a footer, whole pages. */
export function footerBytes(namespaceCount: number, recordCount: number): number {
  return pagesUp(namespaceCount * namespaceBytes + recordCount * recordBytes + trailerBytes);
}

/** `namespaces` are digests in the order of their numbers. */
export function encodeFooter(tail: SegmentTail, namespaces: readonly Uint8Array[], records: FooterRecords): Buffer {
  const out = Buffer.alloc(footerBytes(namespaces.length, records.count));
  let at = 0;
  for (const digest of namespaces) {
    out.set(digest, at);
    at += namespaceBytes;
  }
  const { buffer, byteOffset } = records.words;
  out.set(new Uint8Array(buffer, byteOffset, records.count * recordBytes), at);
  const trailer = out.length - trailerBytes;
  out.write(footerMagic, trailer, 'latin1');
  out.writeUInt32LE(footerVersion, trailer + 8);
  out.writeUInt32LE(tail.id, trailer + 12);
  out.writeUInt32LE(namespaces.length, trailer + 16);
  out.writeUInt32LE(records.count, trailer + 20);
  out.writeBigUInt64LE(BigInt(tail.generation), trailer + 24);
  out.writeBigUInt64LE(BigInt(tail.tail), trailer + 32);
  out.writeUInt32LE(tail.sealed ? 1 : 0, trailer + 40);
  out.writeBigUInt64LE(native.xxh3_64(out.subarray(0, out.length - 8)), out.length - 8);
  return out;
}

/** How many bytes at the end of a file the footer takes that ends with these; undefined: it is none. */
export function footerBytesOf(end: Buffer): number | undefined {
  if (end.length < trailerBytes) return undefined;
  const trailer = end.subarray(end.length - trailerBytes);
  if (trailer.toString('latin1', 0, 8) !== footerMagic || trailer.readUInt32LE(8) !== footerVersion) return undefined;
  return footerBytes(trailer.readUInt32LE(16), trailer.readUInt32LE(20));
}

/** undefined when it is damaged. */
export function decodeFooter(bytes: Buffer): Footer | undefined {
  if (footerBytesOf(bytes) !== bytes.length || !isSound(bytes)) return undefined;
  const trailer = bytes.length - trailerBytes;
  const namespaceCount = bytes.readUInt32LE(trailer + 16);
  const first = namespaceCount * namespaceBytes;
  const count = bytes.readUInt32LE(trailer + 20);
  const records = emptyRecords(count);
  new Uint8Array(records.words.buffer).set(bytes.subarray(first, first + count * recordBytes));
  return {
    id: bytes.readUInt32LE(trailer + 12),
    generation: Number(bytes.readBigUInt64LE(trailer + 24)),
    tail: Number(bytes.readBigUInt64LE(trailer + 32)),
    sealed: bytes.readUInt32LE(trailer + 40) === 1,
    namespaces: Array.from(
      { length: namespaceCount },
      (_, i) => new Uint8Array(bytes.subarray(i * namespaceBytes, (i + 1) * namespaceBytes)),
    ),
    records,
  };
}

/** Bytes of a checkpoint, whole pages. */
export function checkpointBytes(segmentCount: number, blockCount: number): number {
  return pagesUp(segmentCount * segmentUsesBytes + blockCount * 8 + trailerBytes);
}

/** All of it at once. */
export function encodeCheckpoint(checkpoint: Checkpoint): Buffer {
  const encoding = encodingCheckpoint(checkpoint);
  for (;;) {
    const { value, done } = encoding.next();
    if (done) return value;
  }
}

/** Up to the end of each segment: the bytes of many blocks are more than one turn has time for. */
export function* encodingCheckpoint({ tick, segments }: Checkpoint): Generator<void, Buffer> {
  const blockCount = segments.reduce((sum, { uses }) => sum + uses.length / 2, 0);
  const out = Buffer.alloc(checkpointBytes(segments.length, blockCount));
  let at = 0;
  for (const { id, generation, rank, uses } of segments) {
    out.writeUInt32LE(id, at);
    out.writeUInt32LE(rank, at + 4);
    out.writeBigUInt64LE(BigInt(generation), at + 8);
    out.writeUInt32LE(uses.length / 2, at + 16);
    at += segmentUsesBytes;
  }
  for (const { uses } of segments) {
    yield;
    out.set(new Uint8Array(uses.buffer, uses.byteOffset, uses.byteLength), at);
    at += uses.byteLength;
  }
  yield;
  const trailer = out.length - trailerBytes;
  out.write(checkpointMagic, trailer, 'latin1');
  out.writeUInt32LE(checkpointVersion, trailer + 8);
  out.writeUInt32LE(segments.length, trailer + 12);
  out.writeDoubleLE(tick, trailer + 16);
  out.writeBigUInt64LE(native.xxh3_64(out.subarray(0, out.length - 8)), out.length - 8);
  return out;
}

/** undefined when it is damaged. */
export function decodeCheckpoint(bytes: Buffer): Checkpoint | undefined {
  const trailer = bytes.length - trailerBytes;
  if (trailer < 0 || bytes.toString('latin1', trailer, trailer + 8) !== checkpointMagic) return undefined;
  if (bytes.readUInt32LE(trailer + 8) !== checkpointVersion || !isSound(bytes)) return undefined;
  const segmentCount = bytes.readUInt32LE(trailer + 12);
  let at = segmentCount * segmentUsesBytes;
  const segments = Array.from({ length: segmentCount }, (_, i): SegmentUses => {
    const from = i * segmentUsesBytes;
    const uses = new Uint32Array(bytes.readUInt32LE(from + 16) * 2);
    new Uint8Array(uses.buffer).set(bytes.subarray(at, at + uses.byteLength));
    at += uses.byteLength;
    const generation = Number(bytes.readBigUInt64LE(from + 8));
    return { id: bytes.readUInt32LE(from), rank: bytes.readUInt32LE(from + 4), generation, uses };
  });
  return { tick: bytes.readDoubleLE(trailer + 16), segments };
}

const isSound = (bytes: Buffer): boolean =>
  native.xxh3_64(bytes.subarray(0, bytes.length - 8)) === bytes.readBigUInt64LE(bytes.length - 8);
