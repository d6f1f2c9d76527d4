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
import { native } from '@kvtier/native';

export const pageBytes = 4096;
const version = 1;
const headerMagic = 'KVTIERSG';
const footerMagic = 'KVTIERSF';
const checkpointMagic = 'KVTIERCP';
const namespaceBytes = 32;
const recordBytes = 56;
/** At the very end of a footer or checkpoint. */
const trailerBytes = 64;

export const pagesUp = (bytes: number): number => Math.ceil(bytes / pageBytes) * pageBytes;

export interface SegmentHeader {
  readonly id: number;
  readonly generation: number;
  readonly bytes: number;
}

/** One object of an index on disk. Offsets and lengths in whole pages. */
export interface IndexRecord {
  /** Number in the namespace table. */
  readonly namespace: number;
  /** 16 or 32 bytes. */
  readonly hash: Buffer;
  readonly page: number;
  readonly pages: number;
  /** Recency: larger is later. */
  readonly lastUse: number;
  /** Number in the segment table of a checkpoint; 0 in a footer. */
  readonly segment: number;
}

export interface SegmentTail {
  readonly id: number;
  readonly generation: number;
  readonly sealed: boolean;
  /** Where the next object would begin. */
  readonly tail: number;
}

export interface IndexImage {
  readonly segments: readonly SegmentTail[];
  readonly namespaces: readonly Uint8Array[];
  readonly records: readonly IndexRecord[];
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

/** Bytes of an index image, whole pages. */
export function imageBytes(segmentCount: number, namespaceCount: number, recordCount: number): number {
  return pagesUp(segmentCount * 24 + namespaceCount * namespaceBytes + recordCount * recordBytes + trailerBytes);
}

/** A footer (one segment) or a checkpoint (all of them). The trailer lies at its very end. */
export function encodeImage(kind: 'footer' | 'checkpoint', image: IndexImage): Buffer {
  const { segments, namespaces, records } = image;
  const out = Buffer.alloc(imageBytes(segments.length, namespaces.length, records.length));
  let at = 0;
  for (const { id, generation, sealed, tail } of segments) {
    out.writeUInt32LE(id, at);
    out.writeUInt32LE(sealed ? 1 : 0, at + 4);
    out.writeBigUInt64LE(BigInt(generation), at + 8);
    out.writeBigUInt64LE(BigInt(tail), at + 16);
    at += 24;
  }
  for (const digest of namespaces) {
    out.set(digest, at);
    at += namespaceBytes;
  }
  for (const { namespace, hash, page, pages, lastUse, segment } of records) {
    out.set(hash, at);
    out.writeUInt32LE(page, at + 32);
    out.writeUInt32LE(pages, at + 36);
    out.writeUInt32LE(namespace, at + 40);
    out.writeUInt16LE(hash.length, at + 44);
    out.writeUInt16LE(segment, at + 46);
    out.writeDoubleLE(lastUse, at + 48);
    at += recordBytes;
  }
  const trailer = out.length - trailerBytes;
  out.write(kind === 'footer' ? footerMagic : checkpointMagic, trailer, 'latin1');
  out.writeUInt32LE(version, trailer + 8);
  out.writeUInt32LE(segments.length, trailer + 12);
  out.writeUInt32LE(namespaces.length, trailer + 16);
  out.writeUInt32LE(records.length, trailer + 20);
  out.writeBigUInt64LE(native.xxh3_64(out.subarray(0, out.length - 8)), out.length - 8);
  return out;
}

/** How many bytes at the end of a file the image takes that ends with these; undefined: it is none. */
export function imageBytesOf(kind: 'footer' | 'checkpoint', end: Buffer): number | undefined {
  if (end.length < trailerBytes) return undefined;
  const trailer = end.subarray(end.length - trailerBytes);
  if (trailer.toString('latin1', 0, 8) !== (kind === 'footer' ? footerMagic : checkpointMagic)) return undefined;
  if (trailer.readUInt32LE(8) !== version) return undefined;
  return imageBytes(trailer.readUInt32LE(12), trailer.readUInt32LE(16), trailer.readUInt32LE(20));
}

/** undefined when it is damaged. */
export function decodeImage(kind: 'footer' | 'checkpoint', bytes: Buffer): IndexImage | undefined {
  if (imageBytesOf(kind, bytes) !== bytes.length) return undefined;
  if (native.xxh3_64(bytes.subarray(0, bytes.length - 8)) !== bytes.readBigUInt64LE(bytes.length - 8)) return undefined;
  const trailer = bytes.length - trailerBytes;
  let at = 0;
  const segments = Array.from({ length: bytes.readUInt32LE(trailer + 12) }, (): SegmentTail => {
    const from = at;
    at += 24;
    return {
      id: bytes.readUInt32LE(from),
      sealed: bytes.readUInt32LE(from + 4) === 1,
      generation: Number(bytes.readBigUInt64LE(from + 8)),
      tail: Number(bytes.readBigUInt64LE(from + 16)),
    };
  });
  const namespaces = Array.from({ length: bytes.readUInt32LE(trailer + 16) }, () => {
    at += namespaceBytes;
    return Uint8Array.prototype.slice.call(bytes, at - namespaceBytes, at);
  });
  const records = Array.from({ length: bytes.readUInt32LE(trailer + 20) }, (): IndexRecord => {
    const from = at;
    at += recordBytes;
    return {
      hash: bytes.subarray(from, from + bytes.readUInt16LE(from + 44)),
      page: bytes.readUInt32LE(from + 32),
      pages: bytes.readUInt32LE(from + 36),
      namespace: bytes.readUInt32LE(from + 40),
      segment: bytes.readUInt16LE(from + 46),
      lastUse: bytes.readDoubleLE(from + 48),
    };
  });
  return { segments, namespaces, records };
}
