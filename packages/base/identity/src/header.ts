/**
 * The object header: the 256 bytes in front of every stored payload, in every tier below the arena and on the wire.
 *
 * The byte table is docs/formats.md ("Object header"); packages/base/data-plane/cc/object_header.h is the C++ mirror and
 * golden/ pins both. Invariant: no single flipped bit of a header goes unnoticed, and what this program does not know
 * is a reason, never a throw: the world wrote those bytes.
 */
import { Buffer } from 'node:buffer';
import { native } from '@kvtier/data-plane';
import { invariant } from '@kvtier/errors';
import type { HashKey } from './types.ts';

export const headerBytes = 256;
export const headerVersion = 1;
/** The largest `codec` that this program knows; of `flags` it knows none. */
const lastCodec = 1;
/** Where in a header `expiresS` stands, a u32: for those who know that the rest is sound. */
export const expiresOffset = 144;
/** Where in a header `sequence` stands, a u64: in every version, as magic, `version` and `headerChecksum` do. */
export const sequenceOffset = 128;
/** Slots and segment records start and end on this boundary (O_DIRECT). */
export const slotAlignment = 4096;

const magic = Buffer.from('KVTIEROB', 'latin1');
/** Offsets of the table in docs/formats.md. */
const at = {
  magic: 0,
  version: 8,
  headerBytes: 10,
  hashBytes: 12,
  parentHashBytes: 14,
  namespace: 16,
  hash: 48,
  parentHash: 80,
  tokenCount: 112,
  codec: 116,
  flags: 118,
  payloadBytes: 120,
  sequence: sequenceOffset,
  payloadChecksum: 136,
  expires: expiresOffset,
  headerChecksum: 248,
} as const;

export interface Header {
  /** Namespace digest, 32 bytes. */
  readonly namespace: Uint8Array;
  /** Chain hash of the block: 16 or 32 bytes as a key. */
  readonly hash: HashKey;
  /** Chain hash of the block before it; null for the first block of a chain. */
  readonly parent: HashKey | null;
  /** Tokens whose KV the payload holds. */
  readonly tokenCount: number;
  /** Bytes that follow the header, as stored. */
  readonly payloadBytes: number;
  /** 0 = none. Which others there are, their readers know: here every one is sound. */
  readonly codec: number;
  /** None defined in version 1: an object with one is not used (object_header.h, MatchHeader). */
  readonly flags: number;
  /** The writer's sequence: the disk tier stamps its segment generation; 0 elsewhere. */
  readonly sequence: number;
  /** XXH3-64, seed 0, of the payload as stored. */
  readonly payloadChecksum: bigint;
  /** Unix second (below 2^32) from which on the object may not be used; 0: none, also in what older programs wrote. */
  readonly expiresS: number;
}

/** What the caller gives; the rest defaults to 0. */
export type HeaderFields = Omit<Header, 'codec' | 'flags' | 'sequence' | 'expiresS'> &
  Partial<Pick<Header, 'codec' | 'flags' | 'sequence' | 'expiresS'>>;

/**
 * Why bytes are not a header that this program may trust. Checked in this order, in C++ too. 'version': sound, and of another program
 * than this one; what is torn tells nothing of its version.
 */
export type HeaderFault = 'short' | 'magic' | 'checksum' | 'version' | 'fields';

/** The 256 bytes of a header. Fields out of range are a defect of the caller. */
export function encodeHeader(fields: HeaderFields): Buffer {
  const { hash, parent } = fields;
  invariant(hash.length === 16 || hash.length === 32, () => `header: a hash of ${hash.length} bytes`);
  invariant(parent === null || parent.length === hash.length, 'header: parent hash of another length');
  invariant(fields.namespace.length === 32, 'header: the namespace digest is 32 bytes');
  const sequence = fields.sequence ?? 0;
  invariant(Number.isSafeInteger(fields.payloadBytes) && fields.payloadBytes >= 0, 'header: payloadBytes');
  invariant(Number.isSafeInteger(sequence) && sequence >= 0, 'header: sequence');
  const out = Buffer.alloc(headerBytes);
  magic.copy(out, at.magic);
  out.writeUInt16LE(headerVersion, at.version);
  out.writeUInt16LE(headerBytes, at.headerBytes);
  out.writeUInt16LE(hash.length, at.hashBytes);
  out.writeUInt16LE(parent?.length ?? 0, at.parentHashBytes);
  out.set(fields.namespace, at.namespace);
  out.write(hash, at.hash, 'latin1');
  if (parent !== null) out.write(parent, at.parentHash, 'latin1');
  out.writeUInt32LE(fields.tokenCount, at.tokenCount);
  out.writeUInt16LE(fields.codec ?? 0, at.codec);
  out.writeUInt16LE(fields.flags ?? 0, at.flags);
  out.writeBigUInt64LE(BigInt(fields.payloadBytes), at.payloadBytes);
  out.writeBigUInt64LE(BigInt(sequence), at.sequence);
  out.writeBigUInt64LE(fields.payloadChecksum, at.payloadChecksum);
  out.writeUInt32LE(fields.expiresS ?? 0, at.expires);
  out.writeBigUInt64LE(native.xxh3_64(out.subarray(0, at.headerChecksum)), at.headerChecksum);
  return out;
}

/** The header at the start of `bytes` (at least 256 of them), or why it cannot be trusted. Never throws. */
export function decodeHeader(bytes: Uint8Array): Header | { readonly error: HeaderFault } {
  if (bytes.length < headerBytes) return { error: 'short' };
  const source = Buffer.from(bytes.buffer, bytes.byteOffset, headerBytes);
  if (source.compare(magic, 0, magic.length, 0, magic.length) !== 0) return { error: 'magic' };
  const checksum = native.xxh3_64(source.subarray(0, at.headerChecksum));
  if (checksum !== source.readBigUInt64LE(at.headerChecksum)) return { error: 'checksum' };
  if (source.readUInt16LE(at.version) !== headerVersion || source.readUInt16LE(at.headerBytes) !== headerBytes) {
    return { error: 'version' };
  }
  const hashBytes = source.readUInt16LE(at.hashBytes);
  const parentBytes = source.readUInt16LE(at.parentHashBytes);
  const payloadBytes = Number(source.readBigUInt64LE(at.payloadBytes));
  const sequence = Number(source.readBigUInt64LE(at.sequence));
  const sound =
    (hashBytes === 16 || hashBytes === 32) &&
    (parentBytes === 0 || parentBytes === hashBytes) &&
    Number.isSafeInteger(payloadBytes) &&
    Number.isSafeInteger(sequence);
  if (!sound) return { error: 'fields' };
  return {
    namespace: new Uint8Array(source.subarray(at.namespace, at.namespace + 32)),
    hash: source.toString('latin1', at.hash, at.hash + hashBytes) as HashKey,
    parent:
      parentBytes === 0 ? null : (source.toString('latin1', at.parentHash, at.parentHash + parentBytes) as HashKey),
    tokenCount: source.readUInt32LE(at.tokenCount),
    codec: source.readUInt16LE(at.codec),
    flags: source.readUInt16LE(at.flags),
    payloadBytes,
    sequence,
    payloadChecksum: source.readBigUInt64LE(at.payloadChecksum),
    expiresS: source.readUInt32LE(at.expires),
  };
}

/** A header of this version, with a codec or flags that this program does not know: a newer one wrote it. */
export const isNewer = ({ codec, flags }: Pick<Header, 'codec' | 'flags'>): boolean => codec > lastCodec || flags !== 0;

/** Bytes that one object occupies in an arena slot and in a segment: header + payload, whole pages. */
export function slotBytesFor(payloadBytes: number): number {
  return Math.ceil((headerBytes + payloadBytes) / slotAlignment) * slotAlignment;
}
