/**
 * The engine's KV-cache manager: which physical blocks each request's tokens live in, and which prefix of a new request
 * is there already. The life of a request here:
 *
 *   1. getComputedBlocks    the longest cached prefix; nothing is held yet
 *   2. allocateSlots        hold that prefix, add blocks for the tokens of the next step (and for those that a connector
 *                           will load); null when they do not fit, and then nothing has been taken
 *   3. allocateSlots …      more, step by step; full blocks become findable as they are allocated, or, with
 *                           `delayCacheBlocks`, when the caller says so with cacheBlocks
 *   4. free                 last block first; content stays findable until the block is reused
 *
 * Invariant: a hit never includes the last token, because its logits must be computed; hits being whole blocks, a full
 * hit recomputes the last block. Synchronous, pure, no clock. Semantics and names after vLLM V1's KVCacheManager.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';
import { BlockPool } from './block-pool.ts';
import type { CacheHit, Coordinator, GroupBlocks } from './coordinator.ts';
import { type CoordinatorConfig, createCoordinator } from './create-coordinator.ts';
import { EventLog, type KvCacheEvent } from './events.ts';
import type { PrefixCache } from './prefix-cache.ts';
import type { CacheRequest } from './request.ts';
import type { BlockCopy, Growth } from './single-type-manager.ts';
import { PrefixCacheStats, type PrefixCacheStatsSnapshot } from './stats.ts';

export interface KvCacheManagerOptions extends CoordinatorConfig {
  /** Physical blocks, the null block (0) included. */
  readonly blockCount: number;
  /** Share of the blocks that admission leaves free for those already running; default 0. */
  readonly watermark?: number;
  /** Collect events for takeEvents; default off. */
  readonly enableEvents?: boolean;
}

export interface AllocateOptions {
  /** The hit that getComputedBlocks found; only for a request that holds nothing yet. */
  readonly computed?: CacheHit;
  /** Tokens after the hit that a connector will load. */
  readonly externalComputedTokens?: number;
  /** Room for tokens that may be drafted ahead; never cached. */
  readonly lookaheadTokens?: number;
  /** The content is not there yet: do not make it findable; the caller will with cacheBlocks. */
  readonly delayCacheBlocks?: boolean;
  /** Tokens of the encoder's input, for groups of cross attention. */
  readonly encoderTokens?: number;
  /** Refuse unless the whole request would fit, not just this step's share. */
  readonly fullSequenceMustFit?: boolean;
  /** Free blocks that are promised to others. */
  readonly reservedBlocks?: number;
  /** Others run in this step: the watermark applies. Default true. */
  readonly hasScheduledRequests?: boolean;
}

export class KvCacheManager implements PrefixCache {
  readonly blockTokens: number;
  readonly #enableCaching: boolean;
  readonly #maxModelTokens: number;
  readonly #watermarkBlocks: number;
  readonly #events: EventLog;
  readonly #pool: BlockPool;
  readonly #coordinator: Coordinator;
  readonly #noHit: CacheHit;
  readonly #stats = new PrefixCacheStats();

  constructor(options: KvCacheManagerOptions) {
    this.blockTokens = options.blockTokens;
    this.#enableCaching = options.enableCaching ?? true;
    this.#maxModelTokens = options.maxModelTokens;
    this.#watermarkBlocks = Math.floor((options.watermark ?? 0) * options.blockCount);
    this.#events = new EventLog(options.enableEvents ?? false);
    this.#pool = new BlockPool({
      blockCount: options.blockCount,
      enableCaching: this.#enableCaching,
      groupCount: options.groups?.length ?? 1,
      events: this.#events,
    });
    this.#coordinator = createCoordinator(this.#pool, options);
    this.#noHit = { blocks: this.#coordinator.managers.map(() => []), tokens: 0, sharedPrefixBoundary: 0 };
  }

  /** Blocks, the null block included. */
  get blockCount(): number {
    return this.#pool.blockCount;
  }

  get freeBlockCount(): number {
    return this.#pool.freeCount;
  }

  /** Blocks that can be found by their hash. */
  get cachedBlockCount(): number {
    return this.#pool.cachedCount;
  }

  /** Share of the blocks that are held, 0..1. */
  get usage(): number {
    return this.#pool.usage;
  }

  /** The longest cached prefix of a request, without its last token. Nothing is held or counted yet. */
  getComputedBlocks(request: CacheRequest): CacheHit {
    if (!this.#enableCaching || request.skipReadingPrefixCache) return this.#noHit;
    return this.#coordinator.findLongestCacheHit(request.hashes, request.tokenCount - 1);
  }

  /**
   * Blocks for the next `newTokens` tokens of a request. Returns the blocks added for them, by group (not the hit, not
   * the external ones: `blockTables` has all), or null when they do not fit.
   * `newTokens` may be 0 only with external tokens: an asynchronous load that computes nothing yet.
   */
  allocateSlots(request: CacheRequest, newTokens: number, options: AllocateOptions = {}): GroupBlocks | null {
    const external = options.externalComputedTokens ?? 0;
    invariant(newTokens > 0 || external > 0, () => `request ${request.id}: nothing to allocate for`);
    const computed = options.computed ?? this.#noHit;
    const localTokens = request.computedTokens + computed.tokens;
    const computedTokens = Math.min(localTokens + external, this.#maxModelTokens);
    const applyWatermark = (options.hasScheduledRequests ?? true) && !request.running;
    const watermark = applyWatermark ? this.#watermarkBlocks : 0;
    const reach = { computedTokens, localTokens, encoderTokens: options.encoderTokens ?? 0 };
    if (options.fullSequenceMustFit) {
      const whole = this.#growth(request.tokenCount, request.tokenCount, reach);
      const wanted = this.#coordinator.blocksToAllocate(request.id, whole, computed.blocks, true) + watermark;
      if (wanted > this.#pool.freeCount) return null;
    }
    // Before the demand, which it lowers; and it holds whether or not the rest fits.
    this.#coordinator.removeSkippedBlocks(request.id, Math.max(0, computedTokens - (request.inFlightTokens ?? 0)));
    const endTokens = computedTokens + newTokens;
    const step = this.#growth(endTokens + (options.lookaheadTokens ?? 0), endTokens, reach);
    const demanded = this.#coordinator.blocksToAllocate(request.id, step, computed.blocks, false) + watermark;
    if (demanded > this.#pool.freeCount - (options.reservedBlocks ?? 0)) return null;
    // vLLM would fail here; there is nothing to be equal to, so it waits.
    const taken = demanded - watermark + this.#coordinator.blocksBeyondDemand(request.id, step);
    if (taken > this.#pool.freeCount) return null;

    if (computed.tokens > 0 || external > 0) this.#coordinator.addComputedBlocks(request.id, step, computed.blocks);
    const added = this.#coordinator.allocateBlocks(request.id, step);
    if (this.#enableCaching && !options.delayCacheBlocks)
      this.#coordinator.cacheBlocks(request, Math.min(endTokens, request.tokenCount));
    return added;
  }

  /** A scheduling step begins: what was cached in the last one is written by now. */
  newStepStarts(): void {
    this.#coordinator.newStepStarts();
  }

  /**
   * Block copies that the worker must make before the step runs. Source and target of each are held for it: give them
   * back with releaseBlocks, in this order, once the copies are queued before everything that could overwrite them.
   */
  takeBlockCopies(): BlockCopy[] {
    return this.#coordinator.takeCopies();
  }

  /** Make the full blocks among the first `tokens` tokens findable: their content is there. */
  cacheBlocks(request: CacheRequest, tokens: number): void {
    if (this.#enableCaching) this.#coordinator.cacheBlocks(request, tokens);
  }

  /** Let a request's blocks go, last one first. A request that holds none is fine. */
  free(requestId: string): void {
    this.#coordinator.free(requestId);
  }

  /** Block table per group. Valid until the next call that changes it. */
  blockTables(requestId: string): GroupBlocks {
    return this.#coordinator.tables(requestId);
  }

  /** Attention groups: the length of `blockTables`. */
  get groupCount(): number {
    return this.#coordinator.managers.length;
  }

  /** Leading blocks of a group's table that the token after the first `tokens` tokens does not look at. */
  skippedBlocks(group: number, tokens: number): number {
    return this.#coordinator.managers[group]!.skippedBlocks(tokens);
  }

  /**
   * In every group the request's table has all blocks that the tokens after the first `tokens` tokens look at. False
   * when a table was laid out for a longer prefix: what a shorter one's window needs is not there.
   */
  covers(requestId: string, tokens: number): boolean {
    return this.#coordinator.managers.every((manager) => manager.covers(requestId, tokens));
  }

  /** Blocks that a request with a table still takes to compute all its tokens, no more than it holds at any one time. */
  blocksToFinish(request: CacheRequest): number {
    const { tokenCount: tokens, computedTokens } = request;
    const growth = { tokens, mainModelTokens: tokens, computedTokens, localTokens: computedTokens, encoderTokens: 0 };
    return this.#coordinator.blocksToAllocate(request.id, growth, this.#noHit.blocks, true);
  }

  /** Hold blocks beyond their request's life, e.g. while they are exported. */
  holdBlocks(blocks: Iterable<number>): void {
    this.#pool.touch(blocks);
  }

  /** As holdBlocks; the result undoes it, last block first: the tail is reused before what comes before it. */
  hold(blocks: readonly number[]): () => void {
    this.#pool.touch(blocks);
    return () => this.#pool.release([...blocks].reverse());
  }

  /** Undo holdBlocks. */
  releaseBlocks(blocks: readonly number[]): void {
    this.#pool.release(blocks);
  }

  /** Forget what these blocks cache; their holders keep them. */
  evictBlocks(blocks: Iterable<number>): void {
    this.#pool.evict(blocks);
  }

  /** Forget everything cached; false, and nothing done, while any block is held. */
  resetPrefixCache(): boolean {
    if (!this.#pool.reset()) return false;
    this.#stats.recordReset();
    return true;
  }

  /** Leading blocks of a request, per group, that all requests with blocks share; 0 with caching off, as in vLLM. */
  commonPrefixBlocks(requestId: string): number[] {
    return this.#coordinator.managers.map((manager) =>
      this.#enableCaching ? manager.commonPrefixBlocks(requestId) : 0,
    );
  }

  /** Events since the last call; [] when they are off. */
  takeEvents(): KvCacheEvent[] {
    return this.#events.take();
  }

  /** Count a lookup. Called at admission, because a request that waits is looked up many times. */
  recordLookup(queriedTokens: number, hitTokens: number, preempted: boolean): void {
    if (this.#enableCaching) this.#stats.recordLookup(queriedTokens, hitTokens, preempted);
  }

  /** Lookups since the last call. */
  takeStats(): PrefixCacheStatsSnapshot {
    return this.#stats.take();
  }

  /** The pool as it is, for tests and debugging. */
  snapshot(): ReturnType<BlockPool['snapshot']> & { cachedHash(block: number): HashKey | undefined } {
    return { ...this.#pool.snapshot(), cachedHash: (block) => this.#pool.hashOf(block) };
  }

  /** O(blocks). Throws InvariantError at the first thing that does not hold. */
  checkIntegrity(): void {
    this.#pool.checkIntegrity();
    this.#coordinator.checkIntegrity();
  }

  /** (No closures in `allocateSlots`: it runs for every request in every step.) */
  #growth(
    tokens: number,
    mainModelTokens: number,
    reach: Pick<Growth, 'computedTokens' | 'localTokens' | 'encoderTokens'>,
  ): Growth {
    return {
      tokens: Math.min(tokens, this.#maxModelTokens),
      mainModelTokens: Math.min(mainModelTokens, this.#maxModelTokens),
      computedTokens: reach.computedTokens,
      localTokens: reach.localTokens,
      encoderTokens: reach.encoderTokens,
    };
  }
}
