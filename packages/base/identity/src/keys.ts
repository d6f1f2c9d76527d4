/**
 * Hashes in their three shapes: packed bytes (one Buffer, for the native side and the wire), keys (latin1 strings, for
 * maps), and the integers and group keys of vLLM's events. Pure conversions.
 */
import { Buffer } from 'node:buffer';
import { invariant } from '@kvtier/errors';
import type { HashKey } from './types.ts';

/** The hash at `index` of a packed buffer as a map key. */
export function hashKeyAt(packed: Buffer, index: number, hashBytes: number): HashKey {
  return packed.toString('latin1', index * hashBytes, (index + 1) * hashBytes) as HashKey;
}

/** One hash as a map key. */
export function hashKeyOf(hash: Uint8Array): HashKey {
  return Buffer.from(hash.buffer, hash.byteOffset, hash.length).toString('latin1') as HashKey;
}

/** The bytes of a key. */
export function hashOfKey(key: HashKey): Buffer {
  return Buffer.from(key, 'latin1');
}

/** Keys, all of one length, in one buffer. */
export function packHashKeys(keys: readonly HashKey[]): Buffer {
  if (keys.length === 0) return Buffer.alloc(0);
  const hashBytes = keys[0]!.length;
  const packed = Buffer.allocUnsafe(keys.length * hashBytes);
  for (let i = 0; i < keys.length; i++) {
    const written = packed.write(keys[i]!, i * hashBytes, 'latin1');
    invariant(written === hashBytes && keys[i]!.length === hashBytes, 'hash keys of different lengths');
  }
  return packed;
}

/** The hashes of a packed buffer as keys. */
export function unpackHashKeys(packed: Uint8Array, hashBytes: number): HashKey[] {
  invariant(packed.length % hashBytes === 0, () => `${packed.length} bytes are not whole hashes of ${hashBytes}`);
  const source = Buffer.from(packed.buffer, packed.byteOffset, packed.length);
  const keys = new Array<HashKey>(packed.length / hashBytes);
  for (let i = 0; i < keys.length; i++) keys[i] = hashKeyAt(source, i, hashBytes);
  return keys;
}

/** vLLM's external integer form: the last 8 bytes, big-endian, unsigned. */
export function integerForm(hash: Uint8Array | HashKey): bigint {
  const bytes = typeof hash === 'string' ? hashOfKey(hash) : Buffer.from(hash.buffer, hash.byteOffset, hash.length);
  return bytes.readBigUInt64BE(bytes.length - 8);
}

/** vLLM's BlockHashWithGroupId and OffloadKey: the hash, then the group as 4 bytes big-endian. */
export function groupKey(hash: HashKey, group: number): string {
  invariant(Number.isInteger(group) && group >= 0 && group <= 0xffff_ffff, () => `group ${group} is not a u32`);
  return hash + String.fromCharCode(group >>> 24, (group >>> 16) & 0xff, (group >>> 8) & 0xff, group & 0xff);
}

export function splitGroupKey(key: string): { hash: HashKey; group: number } {
  const at = key.length - 4;
  const byte = (i: number) => key.charCodeAt(at + i);
  const group = ((byte(0) << 24) | (byte(1) << 16) | (byte(2) << 8) | byte(3)) >>> 0;
  return { hash: key.slice(0, at) as HashKey, group };
}
