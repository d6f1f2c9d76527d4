/**
 * What the store needs from the world, as constructor arguments: the arena, a clock, a log, a reader of headers. With
 * fakes of these it runs in a simulation; nothing in this package touches a byte of KV or the wall clock by itself.
 */
import type { HashKey, Namespace } from '@kvtier/identity';
import type { ArenaBlock, BlockFields, Tier } from '@kvtier/tiers';

export type { ArenaBlock, BlockFields };

/** The top tier: `ArenaTier` of packages/store/tiers, or a fake. */
export interface ArenaTop extends Tier {
  /** A slot for header + payload, evicting unpinned blocks when there is no free one; undefined: all that is left is pinned. */
  allocate(namespace: Namespace, payloadBytes: number): number | undefined;
  /** An allocation would find one, and evict nothing. */
  hasFreeSlot(payloadBytes: number): boolean;
  /**
   * From now on, an allocation that finds nothing that may go asks for room, some times at most; it tries again where it is told that
   * something was unpinned.
   */
  whenFull?(makeRoom: () => boolean): void;
  /** Give back a slot that was never published. */
  free(slot: number): void;
  /** Write the header and make the block visible. */
  publish(namespace: Namespace, block: BlockFields, slot: number): void;
  get(namespace: Namespace, hash: HashKey): (ArenaBlock & Pick<BlockFields, 'parent'>) | undefined;
  /**
   * Whether the chain that ends with this block is to be refreshed, if it grows now: that is so a few times while so much room is filled
   * once, which is no more than there is.
   */
  isDue(namespace: Namespace, hash: HashKey, roomBytes: number): boolean;
  /** These blocks of a chain are in use, as something is about to follow it. Its end is told first. */
  refresh(namespace: Namespace, hashes: readonly HashKey[]): void;
  /** Counted. A block that is removed while pinned is unlisted at once and freed at its last unpin. */
  pin(namespace: Namespace, hash: HashKey): void;
  unpin(namespace: Namespace, hash: HashKey): void;
}

/** The header of the object in a slot, as a tier has just verified it; undefined when there is none after all. */
export type ReadHeader = (slot: number) => BlockFields | undefined;

/** Which of these blocks of the arena are what their headers say, payload and all; not on the JavaScript thread. */
export type VerifyBlocks = (
  namespace: Namespace,
  blocks: readonly { readonly hash: HashKey; readonly slot: number; readonly payloadBytes: number }[],
) => Promise<readonly boolean[]>;
