/** Blocks of the arena, as who publishes and who reads them sees them. */
import type { HashKey, Namespace } from '@kvtier/identity';

/** What becomes the object header when a block is published. */
export interface BlockFields {
  readonly hash: HashKey;
  /** null at the root of a chain. */
  readonly parent: HashKey | null;
  readonly tokenCount: number;
  readonly payloadBytes: number;
  /** XXH3-64 of the payload. */
  readonly checksum: bigint;
  /** `Header.expiresS`; default 0. */
  readonly expiresS?: number;
}

/** A listed block. `slot` is the offset of its header; the payload follows it. */
export interface ArenaBlock {
  readonly slot: number;
  readonly payloadBytes: number;
  readonly checksum: bigint;
  /** Unix second from which on it may not be used; 0: none. */
  readonly expiresS: number;
}

/** 52 bits; of a block of another namespace that has the same hash, such as that of another rank, they are others. */
export function nameOf({ namespace: { digest }, hash }: { namespace: Namespace; hash: HashKey }): number {
  const low = hash.charCodeAt(0) | (hash.charCodeAt(1) << 8) | (hash.charCodeAt(2) << 16) | (hash.charCodeAt(3) << 24);
  const high = hash.charCodeAt(4) | (hash.charCodeAt(5) << 8) | ((hash.charCodeAt(6) & 0xf) << 16);
  const of = digest[0]! | (digest[1]! << 8) | (digest[2]! << 16) | (digest[3]! << 24);
  return ((low ^ of) >>> 0) + high * 2 ** 32;
}
