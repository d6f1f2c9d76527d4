/**
 * Names of blocks as words: a namespace and a hash become 128 bits, so that an index compares four words and makes no string.
 */
import type { HashKey } from '@kvtier/identity';

/** Hashes one after another, as they travel on the session link. */
export interface PackedHashes {
  readonly packed: Uint8Array;
  readonly hashBytes: number;
}
export type Chain = readonly HashKey[] | PackedHashes;

/** The 128 bits that stand for a namespace, from its key. */
export function tagOf(key: string): Int32Array {
  const tag = Int32Array.of(0x9e3779b9, 0x85ebca6b, 0xc2b2ae35, 0x27d4eb2f);
  for (let at = 0; at < key.length; at++) {
    for (let lane = 0; lane < 4; lane++) {
      const mixed = Math.imul(tag[lane]! ^ (key.charCodeAt(at) + 1 + lane), 0x01000193 + 2 * lane);
      tag[lane] = mixed ^ (mixed >>> 15);
    }
  }
  return tag;
}

/** 32 well mixed bits of a name: 4 words from `from` on. */
export function mix(name: Int32Array, from: number): number {
  const d = name[from + 3]!;
  let h = Math.imul(name[from]! ^ Math.imul(name[from + 1]!, 0x85ebca6b), 0xcc9e2d51);
  h ^= Math.imul(name[from + 2]! ^ (d << 7) ^ (d >>> 25), 0x1b873593);
  h = Math.imul(h ^ (h >>> 16), 0x85ebca6b);
  h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35);
  return h ^ (h >>> 16);
}

export const hashCount = (chain: Chain): number =>
  'packed' in chain ? chain.packed.length / chain.hashBytes : chain.length;

/** The keys of `from`..`to` of a chain. */
export function keysOf(chain: Chain, from = 0, to = hashCount(chain)): HashKey[] {
  if (!('packed' in chain)) return chain.slice(from, to);
  const { packed, hashBytes } = chain;
  const bytes = Buffer.from(packed.buffer, packed.byteOffset, packed.length);
  const keys: HashKey[] = [];
  for (let at = from; at < to; at++)
    keys.push(bytes.toString('latin1', at * hashBytes, (at + 1) * hashBytes) as HashKey);
  return keys;
}

/** The first 16 bytes of a hash, little-endian; shorter names (of tests) are padded. */
export function writeWords(hash: HashKey, words: Int32Array, at: number): void {
  for (let lane = 0; lane < 4; lane++) {
    const i = 4 * lane;
    words[at + lane] =
      i + 3 < hash.length
        ? hash.charCodeAt(i) |
          (hash.charCodeAt(i + 1) << 8) |
          (hash.charCodeAt(i + 2) << 16) |
          (hash.charCodeAt(i + 3) << 24)
        : (hash.charCodeAt(i) || 0) | ((hash.charCodeAt(i + 1) || 0) << 8) | ((hash.charCodeAt(i + 2) || 0) << 16);
  }
}
