/** The four hash algorithms by the names that vLLM's users know, and what differs between them. */
import { Buffer } from 'node:buffer';
import { native } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';
import { encodeCbor, encodePickle, type HashValue } from './encode.ts';
import type { HashAlgorithm } from './types.ts';

/** In the order of the native binding's numbers. */
export const hashAlgorithms: readonly HashAlgorithm[] = ['sha256', 'sha256_cbor', 'xxhash', 'xxhash_cbor'];

/** vLLM's DEFAULT_NONE_HASH_SEED, since #51875. Fixed here for xxhash* too: two processes must always agree. */
export const defaultRootSeed = 'vllm-none-hash';

/** A hash algorithm by the name a user gave; KvError CONFIG for any other. */
export function parseHashAlgorithm(name: string): HashAlgorithm {
  const found = hashAlgorithms.find((algorithm) => algorithm === name);
  if (found === undefined) {
    throw new KvError('CONFIG', `hash algorithm "${name}" is not known; use one of ${hashAlgorithms.join(', ')}`);
  }
  return found;
}

/** Bytes of one hash: 32 for sha256*, 16 for xxhash*. */
export function hashBytesOf(algorithm: HashAlgorithm): 16 | 32 {
  return isSha256(algorithm) ? 32 : 16;
}

export function isCbor(algorithm: HashAlgorithm): boolean {
  return algorithm === 'sha256_cbor' || algorithm === 'xxhash_cbor';
}

function isSha256(algorithm: HashAlgorithm): boolean {
  return algorithm === 'sha256' || algorithm === 'sha256_cbor';
}

/** The bytes that `algorithm` hashes for a value: canonical CBOR, or a whole pickle. */
export function serialize(algorithm: HashAlgorithm, value: HashValue): Buffer {
  return isCbor(algorithm) ? encodeCbor(value) : encodePickle(value);
}

/** vLLM's `hash_fn(value)`. Whole prompts go through ChainHasher instead. */
export function hashValue(algorithm: HashAlgorithm, value: HashValue): Buffer {
  const bytes = serialize(algorithm, value);
  return Buffer.from(isSha256(algorithm) ? native.sha256(bytes) : native.xxh3_128(bytes));
}

/** vLLM's NONE_HASH: the parent of the first block of every chain. `seed` is the value of PYTHONHASHSEED, as text. */
export function rootHash(algorithm: HashAlgorithm, seed: string = defaultRootSeed): Buffer {
  return hashValue(algorithm, seed);
}
