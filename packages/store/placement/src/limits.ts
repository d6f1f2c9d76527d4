/** Every bound of the store, in one place. Bytes are payload bytes. */
import { invariant } from '@kvtier/errors';

export interface StoreLimits {
  /** Reserved and not yet committed, one session: an engine that never commits must leave room for the others. */
  readonly maxReservedBytes: number;
  /** Leased for reading, one session. */
  readonly maxLeasedBytes: number;
  /** Loads that have not ended or are not released, one session. */
  readonly maxLoads: number;
  /** Blocks that loads wait for though they cannot be had yet, one load, which begins in one turn. */
  readonly maxAwaitedOfLoad: number;
  /** The same, one session, and all of them: some 200 bytes of memory each. */
  readonly maxAwaitedBlocks: number;
  readonly maxAwaitedInAll: number;
  /** An awaited block that a tier holds and cannot give is tried again after so long. */
  readonly awaitRetryMs: number;
  /** Asked from the tiers below and not yet arrived, all sessions; each tier has an equal share. */
  readonly maxFetchBytes: number;
  /** One read of a lower tier: large enough for its bandwidth, small enough to share it between loads. */
  readonly fetchBatchBytes: number;
  /** Waiting for or in a write to one lower tier. */
  readonly maxWriteDownBytes: number;
  /** Of the arena, not yet written to one tier whose write policy is 'back'. */
  readonly maxDirtyBytes: number;
  /** One write. What is being written cannot be evicted from the arena. */
  readonly writeDownBatchBytes: number;
  /** The same in blocks: small ones cost the turn in which they begin as much as large ones. */
  readonly writeDownBatchBlocks: number;
  /** Waiting for a burst of commits to end (`TierPlan.settleMs`); more begins to be written at once. */
  readonly maxHeldBytes: number;
  /** Writes in flight to one tier while nothing is being loaded, and while something is. */
  readonly writeDownsIdle: number;
  readonly writeDownsUnderDemand: number;
  /** Kept by Pin, one session. */
  readonly maxPinnedBytes: number;
  readonly maxPinTtlMs: number;
  /** Of its pins with tickets, blocks of all tickets together; beyond them a pin ends by its time alone. */
  readonly maxTicketBlocks: number;
  /** Tickets that were shown, of all sessions: whoever pins with one of them later pins nothing. */
  readonly maxShownTickets: number;
  /** Blocks of pins, loads and prefetches that have ended, let go of in one turn, all sessions. */
  readonly unpinBatchBlocks: number;
  readonly maxDeadlineMs: number;
  /** A read that takes longer is not waited for by new loads: the tier counts as empty until it answers. */
  readonly stuckReadMs: number;
  /** When a tier broke off a read, its slots are used again after so long: no read of any tier takes longer. */
  readonly brokenReadMs: number;
  /** Blocks of the arena that are being verified at a time because an engine found them wrong. */
  readonly maxVerifiedBlocks: number;
  /** Blocks whose use is told to the tiers in one turn; longer chains are told over several, from their tail. */
  readonly touchBatchBlocks: number;
  /** Blocks whose use is still to be told; what comes beyond is dropped, counted. */
  readonly maxTouchBlocks: number;
  /** A read that took longer counts as a failure of its tier, whatever it brought: no plan can use such a tier. */
  readonly slowReadMs: number;
  /** Failures in a row after which a tier is not asked; for how long, at first and at most. */
  readonly breakerFailures: number;
  readonly breakerOpenMs: number;
  readonly breakerMaxOpenMs: number;
  /** Brought by prefetches and not yet used, all sessions: what guesses may take from the arena. */
  readonly maxPrefetchedBytes: number;
  /** Prefetches that have not ended, one session. */
  readonly maxPrefetches: number;
  /**
   * What is still queued for lower tiers when the store closes gets this long: of the 8 s in which a process has to end, S3 may then take 2 s
   * to put its last pack.
   */
  readonly closeDrainMs: number;
}

export function defaultLimits(arenaBytes: number): StoreLimits {
  invariant(arenaBytes > 0, 'store limits: an empty arena');
  const share = (parts: number): number => Math.floor(arenaBytes / parts);
  return {
    maxReservedBytes: share(2),
    maxLeasedBytes: share(2),
    maxLoads: 256,
    maxAwaitedOfLoad: 1 << 13,
    maxAwaitedBlocks: 1 << 15,
    maxAwaitedInAll: 1 << 17,
    awaitRetryMs: 250,
    maxFetchBytes: Math.min(256 << 20, share(4)),
    fetchBatchBytes: 16 << 20,
    maxWriteDownBytes: arenaBytes,
    maxDirtyBytes: share(2),
    writeDownBatchBytes: Math.min(16 << 20, share(16)),
    writeDownBatchBlocks: 128,
    maxHeldBytes: Math.min(512 << 20, share(4)),
    writeDownsIdle: 4,
    writeDownsUnderDemand: 1,
    maxPinnedBytes: share(8),
    maxPinTtlMs: 600_000,
    maxTicketBlocks: 1 << 16,
    maxShownTickets: 1 << 14,
    unpinBatchBlocks: 1_024,
    maxDeadlineMs: 60_000,
    stuckReadMs: 10_000,
    brokenReadMs: 60_000,
    maxVerifiedBlocks: 256,
    touchBatchBlocks: 256,
    maxTouchBlocks: 1 << 18,
    slowReadMs: 3_000,
    breakerFailures: 5,
    breakerOpenMs: 1_000,
    breakerMaxOpenMs: 30_000,
    maxPrefetchedBytes: share(8),
    maxPrefetches: 64,
    closeDrainMs: 5_000,
  };
}
