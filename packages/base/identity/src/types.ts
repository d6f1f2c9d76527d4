/** The words of identity, shared by everything above. */

/** A block hash as a map key: its bytes as a latin1 string (32 characters for sha256*, 16 for xxhash*). */
export type HashKey = string & { readonly __hashKey: never };

/** The names that vLLM's users know (`--prefix-caching-hash-algo`). */
export type HashAlgorithm = 'sha256' | 'sha256_cbor' | 'xxhash' | 'xxhash_cbor';

/** Everything that two engines must have in common to share a block, as one digest. */
export interface Namespace {
  /** SHA-256, 32 bytes. */
  readonly digest: Uint8Array;
  /** The digest as a map key. */
  readonly key: string;
}
