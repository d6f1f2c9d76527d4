/** Blocks of the arena, as who publishes and who reads them sees them. */
import type { HashKey } from '@kvtier/identity';

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
