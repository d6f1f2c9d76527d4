/**
 * The interface of every tier, and the words it uses. A tier holds objects: header + payload, as docs/formats.md has
 * them, keyed by namespace and chain hash. Bytes travel only between the tier and slots of the arena (law 4).
 *
 * Contract, tested by `conformance.ts` against every implementation:
 *  - all operations are batched, and report per block; they throw only for defects, never for what the world does;
 *  - a read that does not match namespace, hash, layout and checksum is 'corrupt': counted, removed, never delivered;
 *  - bytes held never exceed `capacityBytes`, at any instant and after any crash (law 3);
 *  - what `write` reported as 'stored' is found by `lookup` until evicted or removed; a write in flight is not;
 *  - a tier that the world broke (ENOSPC, EIO) goes out of service: lookups miss, writes are 'refused', stats say why.
 */
import type { HashKey, Namespace } from '@kvtier/identity';

export interface TierSupports {
  /** Contents survive the process. */
  readonly persistent: boolean;
  /** Other processes may change the contents. */
  readonly shared: boolean;
}

/** One object in a slot of the arena. `slot` is the offset of its header; the payload follows the header. */
export interface SlotBlock {
  readonly hash: HashKey;
  readonly slot: number;
}

export type WriteStatus = 'stored' | 'held' | 'refused';
export type ReadStatus = 'ready' | 'missing' | 'corrupt' | 'failed';

export interface TierStats {
  readonly tier: string;
  readonly blocks: number;
  /** Bytes held against the budget, preallocated space included. */
  readonly bytes: number;
  readonly capacityBytes: number;
  readonly hits: number;
  readonly misses: number;
  readonly evictions: number;
  readonly corrupt: number;
  readonly refused: number;
  readonly inService: boolean;
  readonly outOfServiceReason: string;
}

export interface Tier {
  readonly name: string;
  readonly supports: TierSupports;

  /** Blocks held from the first hash on, without a gap. In memory and synchronous: it is on the path of a lookup. */
  lookup(namespace: Namespace, hashes: readonly HashKey[]): number;
  /** Recency: these blocks were used, chain order. Parents end up more recent than their children. */
  touch(namespace: Namespace, hashes: readonly HashKey[]): void;
  /** Store objects out of arena slots. The slots stay untouched by the caller until the promise resolves. */
  write(namespace: Namespace, blocks: readonly SlotBlock[]): Promise<WriteStatus[]>;
  /**
   * Bring objects into arena slots, verified. `onDone` is called once per block, as each ends, in any order; the promise
   * resolves after the last.
   */
  read(
    namespace: Namespace,
    blocks: readonly SlotBlock[],
    onDone: (index: number, status: ReadStatus) => void,
  ): Promise<void>;
  /** Forget blocks; `reason` "corrupt" is counted as such. Returns how many were held. */
  remove(namespace: Namespace, hashes: readonly HashKey[], reason: 'corrupt' | 'evicted' | 'asked'): number;
  stats(): TierStats;
  /** Throws InvariantError when index, accounting and policy disagree. */
  checkIntegrity(): void;
  /** Waits for what is in flight; persistent tiers leave a checkpoint. */
  close(): Promise<void>;
}
