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
import type { BlockPolicyName } from '@kvtier/eviction';
import type { HashKey } from '@kvtier/identity';
import { BlockPool, nullBlock } from './block-pool.ts';
import type { CacheHit, ConnectorHit, Coordinator, GroupBlocks } from './coordinator.ts';
import { type CoordinatorConfig, createCoordinator } from './create-coordinator.ts';
import { EventLog, type KvCacheEvent, type PackedEvents } from './events.ts';
import { PinnedPrefixes } from './pinned-prefixes.ts';
import type { AllocateOptions, PrefixCache } from './prefix-cache.ts';
import type { CacheRequest } from './request.ts';
import type { BlockCopy, Growth, PartialTailOffload } from './single-type-manager.ts';
import { PrefixCacheStats, type PrefixCacheStatsSnapshot, RecentHits } from './stats.ts';

export interface KvCacheManagerOptions extends CoordinatorConfig {
  /** Physical blocks, the null block (0) included. */
  readonly blockCount: number;
  /** Share of the blocks that admission leaves free for those already running; default 0. */
  readonly watermark?: number;
  /** Collect events for takeEvents; default off. */
  readonly enableEvents?: boolean;
  /** Of a hash's bytes, how many of the last ones takePackedEvents tells; default 32: all. takeEvents needs them all. */
  readonly packedHashBytes?: 8 | 32 | undefined;
  /** Which cached block goes first; default: the one freed longest ago (vLLM). */
  readonly evictionPolicy?: BlockPolicyName | undefined;
  /** A hit needs equal content besides equal hashes; requests bring `contentDigests`. For hashes that can be made to collide. */
  readonly compareContent?: boolean;
  /** Most blocks that pinned prefixes may hold; default 0: none. */
  readonly maxPinnedBlocks?: number;
}

const noneAdded: GroupBlocks = [[]];

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
  readonly #recent = new RecentHits();
  readonly #pins: PinnedPrefixes;
  readonly #dedupBlocks: boolean;
  /** Copies of prompt tails that a connector stores: held until their request is freed. */
  readonly #tailPins = new Map<string, number[]>();

  constructor(options: KvCacheManagerOptions) {
    this.blockTokens = options.blockTokens;
    this.#enableCaching = options.enableCaching ?? true;
    this.#maxModelTokens = options.maxModelTokens;
    this.#watermarkBlocks = Math.floor((options.watermark ?? 0) * options.blockCount);
    this.#events = new EventLog(options.enableEvents ?? false, undefined, options.packedHashBytes);
    this.#pool = new BlockPool({
      blockCount: options.blockCount,
      enableCaching: this.#enableCaching,
      groupCount: options.groups?.length ?? 1,
      events: this.#events,
      evictionPolicy: options.evictionPolicy,
      compareContent: options.compareContent,
    });
    this.#pins = new PinnedPrefixes(this.#pool, options.maxPinnedBlocks ?? 0);
    this.#dedupBlocks = options.dedupBlocks ?? false;
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

  /** As getComputedBlocks, for a connector that can bring what groups lack; see Coordinator.findHitForConnector. */
  getComputedBlocksForConnector(request: CacheRequest): ConnectorHit {
    if (!this.#enableCaching || request.skipReadingPrefixCache) return { ...this.#noHit, diverged: false };
    return this.#coordinator.findHitForConnector(request.hashes, request.tokenCount - 1);
  }

  /** The first `tokens` tokens of a hit: every group's blocks up to there. `tokens` is an end that all groups have. */
  truncateComputedBlocks(hit: CacheHit, tokens: number): CacheHit {
    invariant(tokens <= hit.tokens, () => `a hit of ${hit.tokens} tokens cut to ${tokens}`);
    const blocks = hit.blocks.map((column, group) =>
      column.slice(0, Math.ceil(tokens / this.#coordinator.managers[group]!.blockTokens)),
    );
    return { ...hit, blocks, tokens };
  }

  /**
   * Blocks for the next `newTokens` tokens of a request. Returns the blocks added for them, by group (not the hit, not
   * the external ones: `blockTables` has all), or null when they do not fit.
   * `newTokens` may be 0 only with external tokens: an asynchronous load that computes nothing yet.
   */
  allocateSlots(request: CacheRequest, newTokens: number, options: AllocateOptions = {}): GroupBlocks | null {
    // By itself: what the errors below say of a request would make an object of each call.
    if (newTokens > 0 && this.#hasRoom(request, newTokens, options)) return noneAdded;
    return this.#allocate(request, newTokens, options);
  }

  #allocate(request: CacheRequest, newTokens: number, options: AllocateOptions): GroupBlocks | null {
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
    this.removeSkippedBlocks(request, computedTokens - (request.inFlightTokens ?? 0));
    const endTokens = computedTokens + newTokens;
    const step = this.#growth(endTokens + (options.lookaheadTokens ?? 0), endTokens, reach);
    const demanded = this.#coordinator.blocksToAllocate(request.id, step, computed.blocks, false) + watermark;
    if (demanded > this.#pool.freeCount - (options.reservedBlocks ?? 0)) return null;
    // vLLM would fail here; there is nothing to be equal to, so it waits.
    const taken = demanded - watermark + this.#coordinator.blocksBeyondDemand(request.id, step);
    if (taken > this.#pool.freeCount) return null;

    if (computed.tokens > 0 || external > 0) {
      this.#coordinator.addComputedBlocks(request.id, step, computed.blocks);
      if (request.reportMode === 'full') this.#reportHits(request, computed.blocks);
    }
    const added = this.#coordinator.allocateBlocks(request.id, step);
    if (this.#enableCaching && !options.delayCacheBlocks) {
      invariant(!this.#dedupBlocks, () => `request ${request.id}: dedupBlocks needs delayCacheBlocks`);
      this.#coordinator.cacheBlocks(request, Math.min(endTokens, request.tokenCount));
    }
    return added;
  }

  /** Most steps of a request that decodes: it grows inside its last block, and no object need be made for that. */
  #hasRoom(request: CacheRequest, newTokens: number, options: AllocateOptions): boolean {
    const { managers } = this.#coordinator;
    if (managers.length !== 1 || options.computed || options.externalComputedTokens || options.fullSequenceMustFit)
      return false;
    if (options.reservedBlocks || (this.#watermarkBlocks > 0 && !request.running)) return false;
    if (this.#enableCaching && !options.delayCacheBlocks) return false;
    const end = request.computedTokens + newTokens + (options.lookaheadTokens ?? 0);
    return managers[0]!.hasRoom(request.id, Math.min(end, this.#maxModelTokens));
  }

  /** Let go of what no token after the first `processedTokens` looks at. allocateSlots does so by itself. */
  removeSkippedBlocks(request: CacheRequest, processedTokens: number): void {
    this.#coordinator.removeSkippedBlocks(request.id, Math.max(0, processedTokens), request.promptTokens);
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

  /**
   * Ends of prompts whose states were copied in this step, for a connector to store: each stays held until its request is
   * freed. Taken after allocateSlots and before its copies are released; what is not taken in its step is gone.
   */
  takePartialTailOffloads(): PartialTailOffload[] {
    const offloads = this.#coordinator.managers.flatMap((manager) => manager.takeTailOffloads());
    for (const { requestId, block } of offloads) {
      invariant(this.#pool.refCount(block) > 0, () => `request ${requestId}: its prompt's end is taken too late`);
      this.#pool.touch([block]);
      this.#tailPins.set(requestId, [...(this.#tailPins.get(requestId) ?? []), block]);
    }
    return offloads;
  }

  /** Make the full blocks among the first `tokens` tokens findable: their content is there. */
  cacheBlocks(request: CacheRequest, tokens: number): void {
    if (this.#enableCaching) this.#coordinator.cacheBlocks(request, tokens);
  }

  /** Let a request's blocks go, last one first. A request that holds none is fine. */
  free(requestId: string): void {
    this.#pool.release(this.#takeTailPins(requestId));
    this.#coordinator.free(requestId);
  }

  /**
   * The request is gone, and steps that still run write to its blocks: they stay held until the caller gives them back with
   * releaseBlocks, reversed. What free would have let go of, pins first, then tables in order.
   */
  popBlocksForFree(requestId: string): number[] {
    return [...this.#takeTailPins(requestId), ...this.#coordinator.managers.flatMap((one) => one.pop(requestId))];
  }

  /** Blocks of the first `tokens` tokens, per group; states and the encoder's output whole. */
  blockIdsForComputedTokens(requestId: string, tokens: number): GroupBlocks {
    return this.#coordinator.managers.map((manager) => manager.blocksOfTokens(requestId, tokens));
  }

  /** Tokens of a request's blocks that a later request could hit in every group, by the last findable block of each. */
  estimateCachedTokens(requestId: string): number {
    const tokens = this.#coordinator.managers.map((manager) => manager.cachedTokens(requestId));
    return tokens.length === 0 ? 0 : Math.min(...tokens);
  }

  /** Blocks of a request's tables that carry no hash, per group, null ones left out: what a connector has yet to store. */
  unhashedBlocks(requestId: string): GroupBlocks {
    return this.#coordinator.managers.map((manager) =>
      manager.table(requestId).filter((block) => block !== nullBlock && this.#pool.hashTokensOf(block) === 0),
    );
  }

  /** Blocks allocated since the last call, which the executor zeroes before their first step. Needs recordNewBlocks. */
  takeNewBlockIds(): number[] {
    return this.#coordinator.managers.flatMap((manager) => manager.takeNewBlocks());
  }

  /** A load into the blocks from token `firstToken` on has failed: they are to be zeroed as new ones are. */
  recordBlocksForZeroing(requestId: string, firstToken: number): void {
    for (const manager of this.#coordinator.managers) manager.recordForZeroing(requestId, firstToken);
  }

  /** Blocks of tokens first..end-1 that wait for takeNewBlockIds. */
  zeroingBlockIdsInRange(requestId: string, first: number, end: number): number[] {
    return this.#coordinator.managers.flatMap((manager) => manager.newBlocksBetween(requestId, first, end));
  }

  /**
   * Hold what is cached of a request's tokens until `unpinPrefix`, in place of what this name held; returns how many tokens that are; with 0
   * there is no pin. Throws KvError CONFIG when pins would hold more than maxPinnedBlocks.
   */
  pinPrefix(name: string, request: CacheRequest): number {
    const hit = this.#enableCaching
      ? this.#coordinator.findLongestCacheHit(request.hashes, request.tokenCount)
      : this.#noHit;
    this.#pins.pin(name, hit.blocks);
    return hit.tokens;
  }

  /** False when nothing is pinned under this name. */
  unpinPrefix(name: string): boolean {
    return this.#pins.unpin(name);
  }

  /** Blocks that pins hold. */
  get pinnedBlockCount(): number {
    return this.#pins.blockCount;
  }

  /** Block table per group. Valid until the next call that changes it. */
  blockTables(requestId: string): GroupBlocks {
    return this.#coordinator.tables(requestId);
  }

  /** One of them, without an array around it. */
  blockTable(requestId: string, group: number): readonly number[] {
    return this.#coordinator.managers[group]!.table(requestId);
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

  heldBlocks({ blocks }: CacheHit): number {
    let held = 0;
    for (const column of blocks)
      for (const block of column) if (block !== nullBlock && !this.#pool.isFree(block)) held++;
    return held;
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

  /** As `hold`, for a reader that is no use of the blocks: what is free comes back to its place in the order of eviction. */
  holdInPlace(blocks: readonly number[]): () => void {
    return this.#pool.holdInPlace(blocks);
  }

  /** Cached blocks among the next `count` that are reused, soonest first. */
  nextEvicted(count: number): number[] {
    return this.#pool.nextEvicted(count);
  }

  /** The hash that a block is found by; undefined: none. */
  cachedHash(block: number): HashKey | undefined {
    return this.#pool.hashOf(block);
  }

  /** Undo holdBlocks. */
  releaseBlocks(blocks: readonly number[]): void {
    this.#pool.release(blocks);
  }

  /** Forget what these blocks cache; their holders keep them. */
  evictBlocks(blocks: Iterable<number>): void {
    this.#pool.evict(blocks);
  }

  forget({ hashes }: Pick<CacheRequest, 'hashes'>, suspects: GroupBlocks): void {
    this.#pool.evictOf(hashes, suspects.flat());
  }

  /** Forget everything cached; false, and nothing done, while any block is held. */
  resetPrefixCache(): boolean {
    if (!this.#pool.reset()) return false;
    this.#stats.recordReset();
    this.#recent.clear();
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

  /** As takeEvents, without an object for each. */
  takePackedEvents(): PackedEvents {
    return this.#events.takePacked();
  }

  /** What can be found now, for who has not heard the events. */
  heldEvents(): Iterable<readonly KvCacheEvent[]> {
    return this.#pool.heldEvents(this.#coordinator.managers);
  }

  /** Count a lookup. Called at admission, because a request that waits is looked up many times. */
  recordLookup(queriedTokens: number, hitTokens: number, preempted: boolean): void {
    if (!this.#enableCaching) return;
    this.#stats.recordLookup(queriedTokens, hitTokens, preempted);
    if (!preempted) this.#recent.record(queriedTokens, hitTokens);
  }

  /** Share of the tokens of the last 1000 requests that hit, 0..1. */
  get recentHitRatio(): number {
    return this.#recent.ratio;
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
    this.#pins.checkIntegrity();
    this.#coordinator.checkIntegrity();
  }

  #takeTailPins(requestId: string): number[] {
    const pins = this.#tailPins.get(requestId) ?? [];
    this.#tailPins.delete(requestId);
    return pins;
  }

  #reportHits(request: CacheRequest, hit: GroupBlocks): void {
    this.#coordinator.managers.forEach((manager, group) => {
      manager.reportHits(request, hit[group]!.length);
    });
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
