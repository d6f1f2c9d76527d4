/**
 * What the manager asks of all attention groups together. A model with one kind of attention has one group, and then
 * this only passes on (vLLM's UnitaryKVCacheCoordinator); a hybrid model's coordinator reconciles the groups' hits.
 * Arrays are indexed by group.
 */
import type { BlockPool } from './block-pool.ts';
import { FullAttentionManager } from './full-attention.ts';
import type { BlockHashes, CacheRequest } from './request.ts';
import type { SingleTypeManager } from './single-type-manager.ts';

export type GroupBlocks = readonly (readonly number[])[];

export interface CacheHit {
  readonly blocks: GroupBlocks;
  /** Tokens of the hit: the same for all groups. */
  readonly tokens: number;
  /** Where a sparse group fell behind another one; 0 when none did (always, with full attention alone). */
  readonly sharedPrefixBoundary: number;
}

export interface Coordinator {
  readonly managers: readonly SingleTypeManager[];
  findLongestCacheHit(hashes: BlockHashes, maxTokens: number): CacheHit;
  blocksToAllocate(requestId: string, tokens: number, computed: GroupBlocks): number;
  addComputedBlocks(requestId: string, computed: GroupBlocks): void;
  allocateBlocks(requestId: string, tokens: number): GroupBlocks;
  cacheBlocks(request: CacheRequest, tokens: number): void;
  free(requestId: string): void;
  tables(requestId: string): GroupBlocks;
  checkIntegrity(): void;
}

/** One group of full attention. */
export class UnitaryCoordinator implements Coordinator {
  readonly managers: readonly SingleTypeManager[];
  readonly #manager: SingleTypeManager;

  constructor(pool: BlockPool, blockTokens: number) {
    this.#manager = new FullAttentionManager(pool, 0, blockTokens);
    this.managers = [this.#manager];
  }

  findLongestCacheHit(hashes: BlockHashes, maxTokens: number): CacheHit {
    const blocks = this.#manager.findLongestCacheHit(hashes, maxTokens);
    return { blocks: [blocks], tokens: blocks.length * this.#manager.blockTokens, sharedPrefixBoundary: 0 };
  }

  blocksToAllocate(requestId: string, tokens: number, computed: GroupBlocks): number {
    return this.#manager.blocksToAllocate(requestId, tokens, computed[0]!);
  }

  addComputedBlocks(requestId: string, computed: GroupBlocks): void {
    this.#manager.addComputedBlocks(requestId, computed[0]!);
  }

  allocateBlocks(requestId: string, tokens: number): GroupBlocks {
    return [this.#manager.allocateBlocks(requestId, tokens)];
  }

  cacheBlocks(request: CacheRequest, tokens: number): void {
    this.#manager.cacheBlocks(request, tokens);
  }

  free(requestId: string): void {
    this.#manager.free(requestId);
  }

  tables(requestId: string): GroupBlocks {
    return [this.#manager.table(requestId)];
  }

  checkIntegrity(): void {
    this.#manager.checkIntegrity();
  }
}
