/**
 * What the engine needs of a prefix cache: which physical blocks a request's tokens live in, and which prefix of a new
 * request is there already. Two structures stand behind it, and the engine's outputs are the same with either:
 *
 *   'blocks'   KvCacheManager   a hash map of full blocks over one free queue (vLLM V1)
 *   'radix'    RadixCache       a radix tree of token sequences with lock references (SGLang)
 *
 * The contract of each member is KvCacheManager's. Invariant for the caller: tables are read anew for every step, because
 * cacheBlocks may exchange a block for an equal one that was cached first.
 */
import type { CacheHit, GroupBlocks } from './coordinator.ts';
import type { KvCacheEvent, PackedEvents } from './events.ts';
import type { CacheRequest } from './request.ts';
import type { PrefixCacheStatsSnapshot } from './stats.ts';

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

export const prefixCacheKinds = ['blocks', 'radix'] as const;
export type PrefixCacheKind = (typeof prefixCacheKinds)[number];

/** A request as both structures see it: the block pool by its hashes, the tree by its tokens. */
export interface PrefixCacheRequest extends CacheRequest {
  /** Token ids first..end-1: a view. */
  tokenIds(first: number, end: number): Int32Array;
  /** Adapter and salt: requests share blocks only with requests of the same one. '' is none. */
  readonly extraKey: string;
  /** For eviction by priority: higher ones stay longer. Default 0. */
  readonly priority?: number;
}

export interface PrefixCache {
  readonly blockTokens: number;
  /** Blocks, the null block included. */
  readonly blockCount: number;
  /** Blocks that can be had, those whose cached content must go for it included. */
  readonly freeBlockCount: number;
  /** Blocks that can be hit. */
  readonly cachedBlockCount: number;
  getComputedBlocks(request: PrefixCacheRequest): CacheHit;
  allocateSlots(request: PrefixCacheRequest, newTokens: number, options?: AllocateOptions): GroupBlocks | null;
  /** Make the full blocks among the first `tokens` tokens findable: their content is there. */
  cacheBlocks(request: PrefixCacheRequest, tokens: number): void;
  free(requestId: string): void;
  blockTables(requestId: string): GroupBlocks;
  /** One of them, without an array around it. */
  blockTable(requestId: string, group: number): readonly number[];
  /** Attention groups: the length of `blockTables`. */
  readonly groupCount: number;
  /** Leading blocks of a group's table that the token after the first `tokens` tokens does not look at. */
  skippedBlocks(group: number, tokens: number): number;
  /** The request's tables have all blocks that the tokens after the first `tokens` tokens look at. */
  covers(requestId: string, tokens: number): boolean;
  /** Blocks that a request with a table still takes to compute all its tokens. */
  blocksToFinish(request: PrefixCacheRequest): number;
  /** Of a hit, the blocks that somebody holds: to have them, too, takes no room. */
  heldBlocks(hit: CacheHit): number;
  /** Hold cached blocks of one chain, in its order, beyond their request's life; the result lets them go, once. */
  hold(blocks: readonly number[]): () => void;
  /**
   * These blocks were this request's, and one of them is damaged: no request finds them any more, as far as they still hold what they held
   * for it. Who holds them keeps them; what a connector has of them is its own. `suspects`: its tables of then.
   */
  forget(request: PrefixCacheRequest, suspects: GroupBlocks): void;
  resetPrefixCache(): boolean;
  recordLookup(queriedTokens: number, hitTokens: number, preempted: boolean): void;
  takeStats(): PrefixCacheStatsSnapshot;
  takeEvents(): KvCacheEvent[];
  /** As takeEvents, without an object for each: for a publisher. Valid until the next change. */
  takePackedEvents(): PackedEvents;
  /** What those know who heard all events up to the last one taken: a copy of this moment, in pages. Only while events are on. */
  heldEvents(): Iterable<readonly KvCacheEvent[]>;
  checkIntegrity(): void;
}
