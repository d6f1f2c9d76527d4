/**
 * The two serialisations under a block hash, for what is rare: roots, extra keys, namespaces. (Tokens are serialised in
 * native code.) Invariant: byte for byte what Python's `cbor2.dumps(x, canonical=True)` and `pickle.dumps(x, 5)` give for
 * None, int, str, bytes and tuples of them. Sources: RFC 8949 section 4.2, CPython Modules/_pickle.c.
 */
import { Buffer } from 'node:buffer';
import { invariant, KvError } from '@kvtier/errors';

/** Python's None, int, str, bytes, tuple. */
export type HashValue = null | number | bigint | string | Uint8Array | readonly HashValue[];

/** What CBOR takes beyond that: maps with text keys (namespaces). */
export type CborValue = HashValue | readonly CborValue[] | { readonly [key: string]: CborValue };

/** Above this, CPython splits a pickle into several frames; nothing that vLLM hashes comes near it. */
export const pickleFrameBytesMax = 65_536;

function utf8(text: string): Buffer {
  // Python refuses them in CBOR; JavaScript would silently hash U+FFFD, and two different texts would share a hash.
  if (/\p{Surrogate}/u.test(text)) {
    throw new KvError('REQUEST', 'a text of the cache key (adapter, salt or content hash) holds a lone surrogate');
  }
  return Buffer.from(text, 'utf8');
}

function integer(value: number | bigint): bigint {
  invariant(typeof value === 'bigint' || Number.isSafeInteger(value), () => `${value} is not an exact integer`);
  return BigInt(value);
}

// ---- CBOR -----------------------------------------------------------------------------------------------------------

function cborHead(major: number, argument: bigint): Buffer {
  const type = major << 5;
  if (argument < 24n) return Buffer.of(type | Number(argument));
  invariant(argument < 1n << 64n, 'CBOR: an integer beyond 64 bits');
  const bytes = argument < 1n << 8n ? 1 : argument < 1n << 16n ? 2 : argument < 1n << 32n ? 4 : 8;
  const out = Buffer.alloc(9);
  out.writeBigUInt64BE(argument, 1);
  out[8 - bytes] = type | (24 + Math.log2(bytes));
  return out.subarray(8 - bytes);
}

/** Canonical CBOR. Map entries are sorted by their encoded keys. */
export function encodeCbor(value: CborValue): Buffer {
  if (value === null) return Buffer.of(0xf6);
  if (typeof value === 'number' || typeof value === 'bigint') {
    const n = integer(value);
    return n >= 0n ? cborHead(0, n) : cborHead(1, -1n - n);
  }
  if (typeof value === 'string') {
    const bytes = utf8(value);
    return Buffer.concat([cborHead(3, BigInt(bytes.length)), bytes]);
  }
  if (value instanceof Uint8Array) return Buffer.concat([cborHead(2, BigInt(value.length)), value]);
  if (Array.isArray(value)) {
    return Buffer.concat([cborHead(4, BigInt(value.length)), ...value.map((item: CborValue) => encodeCbor(item))]);
  }
  const entries = Object.entries(value).map(([key, item]) => [encodeCbor(key), encodeCbor(item)] as const);
  entries.sort((left, right) => Buffer.compare(left[0], right[0]));
  return Buffer.concat([cborHead(5, BigInt(entries.length)), ...entries.flat()]);
}

// ---- pickle, protocol 5 ---------------------------------------------------------------------------------------------

/** What a pickler remembers: how many objects were memoised, and where the shared ones are. */
interface Memo {
  count: number;
  readonly texts: Map<string, number>;
}

function pickleInteger(value: number | bigint): Buffer {
  const n = integer(value);
  if (n >= 0n && n < 1n << 8n) return Buffer.of(0x4b, Number(n));
  if (n >= 0n && n < 1n << 16n) return Buffer.of(0x4d, Number(n & 0xffn), Number(n >> 8n));
  const out = Buffer.alloc(16);
  if (n >= -(1n << 31n) && n < 1n << 31n) {
    out[0] = 0x4a;
    out.writeInt32LE(Number(n), 1);
    return out.subarray(0, 5);
  }
  invariant(n >= -(1n << 63n) && n < 1n << 64n, 'pickle: an integer beyond 64 bits');
  // LONG1: two's complement in as few bytes as hold the sign bit too.
  let bytes = 1;
  while (BigInt.asIntN(8 * bytes, n) !== n) bytes++;
  out[0] = 0x8a;
  out[1] = bytes;
  out.writeBigUInt64LE(BigInt.asUintN(64, n), 2);
  return out.subarray(0, 2 + bytes);
}

function sized(short: number, long: number, bytes: Uint8Array): Buffer {
  const head = bytes.length < 256 ? Buffer.of(short, bytes.length) : Buffer.alloc(5);
  if (bytes.length >= 256) {
    head[0] = long;
    head.writeUInt32LE(bytes.length, 1);
  }
  return Buffer.concat([head, bytes]);
}

/** Opcodes of one value; memoises as CPython does. */
function pickleBody(value: HashValue, memo: Memo): Buffer {
  const memoised = (bytes: Buffer) => {
    memo.count++;
    return Buffer.concat([bytes, Buffer.of(0x94)]);
  };
  if (value === null) return Buffer.of(0x4e);
  if (typeof value === 'number' || typeof value === 'bigint') return pickleInteger(value);
  if (typeof value === 'string') {
    // CPython pickles the same object only once, then refers to it. Which equal texts are the same object cannot be
    // known from outside, except for those that it always shares: "" and single characters below U+0100.
    const shared = value.length === 0 || (value.length === 1 && value <= '\xff');
    const known = shared ? memo.texts.get(value) : undefined;
    if (known !== undefined) {
      invariant(known < 256, 'pickle: more than 256 objects before a shared text');
      return Buffer.of(0x68, known);
    }
    if (shared) memo.texts.set(value, memo.count);
    return memoised(sized(0x8c, 0x58, utf8(value)));
  }
  if (value instanceof Uint8Array) return memoised(sized(0x43, 0x42, value));
  if (value.length === 0) return Buffer.of(0x29);
  const items = value.map((item) => pickleBody(item, memo));
  if (value.length <= 3) return memoised(Buffer.concat([...items, Buffer.of(0x84 + value.length)]));
  return memoised(Buffer.concat([Buffer.of(0x28), ...items, Buffer.of(0x74)]));
}

/** The opcodes of a value inside a larger pickle in which `memoised` objects came before. */
export function encodePicklePart(value: HashValue, memoised: number): Buffer {
  return pickleBody(value, { count: memoised, texts: new Map() });
}

/** A whole pickle: protocol, one frame, stop. */
export function encodePickle(value: HashValue): Buffer {
  const body = encodePicklePart(value, 0);
  const head = Buffer.from('8005950000000000000000', 'hex');
  const frameBytes = body.length + 1;
  if (frameBytes > pickleFrameBytesMax) {
    throw new KvError('REQUEST', 'a cache key of over 64 KiB; use a _cbor hash algorithm, which has no such limit');
  }
  head.writeBigUInt64LE(BigInt(frameBytes), 3);
  return Buffer.concat([head, body, Buffer.of(0x2e)]);
}
