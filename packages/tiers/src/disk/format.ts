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
import type { HashKey } from '@kvtier/identity';
import { native } from '@kvtier/native';
import type { FoundBlock } from './recovery.ts';

export const pageBytes = 4096;
const version = 1;
const headerMagic = 'KVTIERSG';
const footerMagic = 'KVTIERSF';
const checkpointMagic = 'KVTIERCP';
const namespaceBytes = 32;
const erased = new Uint8Array(namespaceBytes);
const recordBytes = 56;
const segmentUsesBytes = 24;
/** Of footers and checkpoints. */
const imageVersion = 2;
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

/** One object of a footer. Offsets and lengths in whole pages. */
export interface FooterRecord {
  /** Number in the namespace table. */
  readonly namespace: number;
  readonly hash: HashKey;
  readonly page: number;
  readonly pages: number;
  /** Recency: larger is later. */
  readonly lastUse: number;
  readonly hot: boolean;
}

/** A footer that verified. */
export interface Footer extends SegmentTail {
  /** One object for all of them: there may be a million. */
  records(): Iterable<FoundBlock>;
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

/** undefined when the page is not a segment header that this program wrote. */
export function decodeSegmentHeader(page: Buffer): SegmentHeader | undefined {
  if (page.length < pageBytes || page.toString('latin1', 0, 8) !== headerMagic) return undefined;
  if (page.readUInt32LE(8) !== version) return undefined;
  if (native.xxh3_64(page.subarray(0, pageBytes - 8)) !== page.readBigUInt64LE(pageBytes - 8)) return undefined;
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
export function encodeFooter(
  tail: SegmentTail,
  namespaces: readonly Uint8Array[],
  records: Iterable<FooterRecord>,
  recordCount: number,
): Buffer {
  const out = Buffer.alloc(footerBytes(namespaces.length, recordCount));
  let at = 0;
  for (const digest of namespaces) {
    out.set(digest, at);
    at += namespaceBytes;
  }
  for (const { namespace, hash, page, pages, lastUse, hot } of records) {
    out.write(hash, at, 'latin1');
    out.writeUInt32LE(page, at + 32);
    out.writeUInt32LE(pages, at + 36);
    out.writeUInt32LE(namespace, at + 40);
    out[at + 44] = hash.length;
    out[at + 45] = hot ? 1 : 0;
    out.writeDoubleLE(lastUse, at + 48);
    at += recordBytes;
  }
  const trailer = out.length - trailerBytes;
  out.write(footerMagic, trailer, 'latin1');
  out.writeUInt32LE(imageVersion, trailer + 8);
  out.writeUInt32LE(tail.id, trailer + 12);
  out.writeUInt32LE(namespaces.length, trailer + 16);
  out.writeUInt32LE(recordCount, trailer + 20);
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
  if (trailer.toString('latin1', 0, 8) !== footerMagic || trailer.readUInt32LE(8) !== imageVersion) return undefined;
  return footerBytes(trailer.readUInt32LE(16), trailer.readUInt32LE(20));
}

/** undefined when it is damaged. */
export function decodeFooter(bytes: Buffer): Footer | undefined {
  if (footerBytesOf(bytes) !== bytes.length || !isSound(bytes)) return undefined;
  const trailer = bytes.length - trailerBytes;
  const namespaceCount = bytes.readUInt32LE(trailer + 16);
  const first = namespaceCount * namespaceBytes;
  const count = bytes.readUInt32LE(trailer + 20);
  const namespaces = Array.from({ length: namespaceCount }, (_, i) =>
    Uint8Array.prototype.slice.call(bytes, i * namespaceBytes, (i + 1) * namespaceBytes),
  );
  return {
    id: bytes.readUInt32LE(trailer + 12),
    generation: Number(bytes.readBigUInt64LE(trailer + 24)),
    tail: Number(bytes.readBigUInt64LE(trailer + 32)),
    sealed: bytes.readUInt32LE(trailer + 40) === 1,
    records: function* () {
      const block = { source: bytes, at: 0, hashBytes: 0, namespace: erased, page: 0, pages: 0, hot: false };
      for (let at = first; at < first + count * recordBytes; at += recordBytes) {
        const namespace = namespaces[bytes.readUInt32LE(at + 40)];
        if (namespace === undefined) continue;
        block.at = at;
        block.hashBytes = bytes[at + 44]!;
        block.namespace = namespace;
        block.page = bytes.readUInt32LE(at + 32);
        block.pages = bytes.readUInt32LE(at + 36);
        block.hot = bytes[at + 45] === 1;
        yield block;
      }
    },
  };
}

/** Bytes of a checkpoint, whole pages. */
export function checkpointBytes(segmentCount: number, blockCount: number): number {
  return pagesUp(segmentCount * segmentUsesBytes + blockCount * 8 + trailerBytes);
}

export function encodeCheckpoint({ tick, segments }: Checkpoint): Buffer {
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
    out.set(new Uint8Array(uses.buffer, uses.byteOffset, uses.byteLength), at);
    at += uses.byteLength;
  }
  const trailer = out.length - trailerBytes;
  out.write(checkpointMagic, trailer, 'latin1');
  out.writeUInt32LE(imageVersion, trailer + 8);
  out.writeUInt32LE(segments.length, trailer + 12);
  out.writeDoubleLE(tick, trailer + 16);
  out.writeBigUInt64LE(native.xxh3_64(out.subarray(0, out.length - 8)), out.length - 8);
  return out;
}

/** undefined when it is damaged. */
export function decodeCheckpoint(bytes: Buffer): Checkpoint | undefined {
  const trailer = bytes.length - trailerBytes;
  if (trailer < 0 || bytes.toString('latin1', trailer, trailer + 8) !== checkpointMagic) return undefined;
  if (bytes.readUInt32LE(trailer + 8) !== imageVersion || !isSound(bytes)) return undefined;
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
