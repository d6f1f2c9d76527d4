/**
 * The blocks of all requests for one attention group. What differs between attention types is which blocks a hit needs
 * and which may be let go while the request runs; sliding window, chunked and state-space managers implement the same.
 *
 * Invariant: tables are append-only (a block id once given stays at its place until the request is freed), and
 * `blocksToAllocate` predicts exactly what the allocation takes from the free queue. After vLLM's
 * SingleTypeKVCacheManager.
 */
import type { BlockHashes, CacheRequest } from './request.ts';

export interface SingleTypeManager {
  /** Attention type as events name it. */
  readonly kind: string;
  readonly blockTokens: number;

  /** Longest prefix held, at most `maxTokens`, as block ids in chain order. Nothing is touched. */
  findLongestCacheHit(hashes: BlockHashes, maxTokens: number): number[];

  /**
   * Blocks that leave the free queue when the request grows to `tokens`, given that `computed` blocks (a hit) are
   * taken over: a hit on a free block counts, because it is taken out of the queue too.
   */
  blocksToAllocate(requestId: string, tokens: number, computed: readonly number[]): number;

  /** First phase of an admission: hold the hit and start the table with it. */
  addComputedBlocks(requestId: string, computed: readonly number[]): void;

  /** Grow the table to hold `tokens`; returns only the blocks added. Second phase for external tokens, too. */
  allocateBlocks(requestId: string, tokens: number): number[];

  /** Make the full blocks among the first `tokens` tokens findable. */
  cacheBlocks(request: CacheRequest, tokens: number): void;

  /** Let the request's blocks go, last one first, so that a chain is evicted from its tail. Unknown ids are fine. */
  free(requestId: string): void;

  /** The request's table; empty when there is none. */
  table(requestId: string): readonly number[];

  /** Leading blocks of this request that every request with blocks shares. */
  commonPrefixBlocks(requestId: string): number;

  /** Requests that have a table. */
  readonly requestCount: number;

  checkIntegrity(): void;
}
