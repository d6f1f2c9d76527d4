/**
 * The pack: an immutable S3 object that holds a table and the objects it names. Byte tables in docs/formats.md, pinned by
 * golden/pack.bin.
 *
 *     0        64          64 + 88 n     offset of the first
 *     ┌────────┬──────────┬─────────────┬────────┬─────┬────────┐
 *     │ header │ record 0 │ ... n − 1   │ object │ ... │ object │   no gaps, no padding
 *     └────────┴──────────┴─────────────┴────────┴─────┴────────┘
 *
 * Invariant: a table is used only when its checksum holds and every record lies within the pack; what does not begin with the
 * magic is foreign, and left alone.
 */
import { Buffer } from 'node:buffer';
import { native } from '@kvtier/data-plane';
import { invariant } from '@kvtier/errors';
import { type HashKey, type Namespace, namespaceFromDigest } from '@kvtier/identity';

export const packHeaderBytes = 64;
export const packRecordBytes = 88;
/** A table of at most 352 KiB: one read at start for each pack. */
export const maxPackRecords = 4096;
const magic = 'KVTIERPK';
const version = 1;
const checksumAt = 56;

export interface PackRecord {
  readonly namespace: Namespace;
  readonly hash: HashKey;
  /** Of the object's header, from the start of the pack. */
  readonly offset: number;
  /** Header and payload. */
  readonly bytes: number;
}

export interface PackTable {
  /** 16 random bytes, as hex: tells a pack from every other that had its name. */
  readonly id: string;
  readonly packBytes: number;
  readonly records: readonly PackRecord[];
}

export const packTableBytes = (recordCount: number): number => packHeaderBytes + recordCount * packRecordBytes;

/** Header and records of a pack with these objects, in order, one behind the other. */
export function encodePackTable(
  id: string,
  objects: readonly { readonly namespace: Namespace; readonly hash: HashKey; readonly bytes: number }[],
): Buffer {
  invariant(objects.length > 0 && objects.length <= maxPackRecords, 's3: a pack of no or too many objects');
  const out = Buffer.alloc(packTableBytes(objects.length));
  let offset = out.length;
  for (const [index, { namespace, hash, bytes }] of objects.entries()) {
    const at = packTableBytes(index);
    out.set(namespace.digest, at);
    out.write(hash, at + 32, 'latin1');
    out.writeUInt32LE(hash.length, at + 64);
    out.writeBigUInt64LE(BigInt(offset), at + 72);
    out.writeBigUInt64LE(BigInt(bytes), at + 80);
    offset += bytes;
  }
  out.write(magic, 0, 'latin1');
  out.writeUInt32LE(version, 8);
  out.writeUInt32LE(objects.length, 12);
  out.writeBigUInt64LE(BigInt(offset), 16);
  out.write(id, 24, 'hex');
  out.writeBigUInt64LE(checksumOf(out), checksumAt);
  return out;
}

/** The checksum covers header and records, its own field taken as zero. */
function checksumOf(table: Buffer): bigint {
  const copy = Buffer.from(table);
  copy.fill(0, checksumAt, checksumAt + 8);
  return native.xxh3_64(copy);
}

/** Bytes of the table that begins so; 'foreign': not a pack, or of a later version; 'damaged': was one. */
export function packTableBytesOf(start: Buffer): number | 'foreign' | 'damaged' {
  if (start.length < packHeaderBytes || start.toString('latin1', 0, 8) !== magic) return 'foreign';
  if (start.readUInt32LE(8) !== version) return 'foreign';
  const recordCount = start.readUInt32LE(12);
  return recordCount > 0 && recordCount <= maxPackRecords ? packTableBytes(recordCount) : 'damaged';
}

/** `objectBytes`: what the server says is the length of the whole. */
export function decodePackTable(table: Buffer, objectBytes: number): PackTable | 'damaged' {
  if (table.readBigUInt64LE(checksumAt) !== checksumOf(table)) return 'damaged';
  const packBytes = Number(table.readBigUInt64LE(16));
  if (packBytes !== objectBytes) return 'damaged';
  const namespaces = new Map<string, Namespace>();
  const records: PackRecord[] = [];
  for (let at = packHeaderBytes; at < table.length; at += packRecordBytes) {
    const digest = Uint8Array.prototype.slice.call(table, at, at + 32);
    const key = Buffer.from(digest).toString('latin1');
    const namespace = namespaces.get(key) ?? namespaceFromDigest(digest);
    namespaces.set(key, namespace);
    const hashBytes = table.readUInt32LE(at + 64);
    const hash = table.toString('latin1', at + 32, at + 32 + hashBytes) as HashKey;
    const offset = Number(table.readBigUInt64LE(at + 72));
    const bytes = Number(table.readBigUInt64LE(at + 80));
    const sound = (hashBytes === 16 || hashBytes === 32) && offset >= table.length && offset + bytes <= packBytes;
    if (!sound) return 'damaged';
    records.push({ namespace, hash, offset, bytes });
  }
  return { id: table.toString('hex', 24, 40), packBytes, records };
}
