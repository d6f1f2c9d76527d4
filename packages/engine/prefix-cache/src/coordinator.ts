/**
 * What the manager asks of all attention groups together. Allocation and release go through the groups in order; what
 * coordinators differ in is how the groups' hits become one (and what is cached so that they can):
 *
 *   UncachedCoordinator   no hits at all
 *   UnitaryCoordinator    one group: its hit
 *   HybridCoordinator     several: the longest hit that all of them have (hybrid-coordinator.ts)
 *
 * Arrays are indexed by group. After vLLM's KVCacheCoordinator.
 */
import type { BlockHashes, CacheRequest } from './request.ts';
import type { BlockCopy, Growth, Retention, SingleTypeManager } from './single-type-manager.ts';

export type GroupBlocks = readonly (readonly number[])[];

export interface CacheHit {
  readonly blocks: GroupBlocks;
  /** Tokens of the hit: the same for all groups. */
  readonly tokens: number;
  /** Where a sparse group fell behind another one; 0 when none did (always, with full attention alone). */
  readonly sharedPrefixBoundary: number;
}

export interface ConnectorHit extends CacheHit {
  /** Some group holds less than `tokens`: the connector has to bring the rest of it. */
  readonly diverged: boolean;
}

export interface CoordinatorOptions {
  readonly managers: readonly SingleTypeManager[];
  /** Groups whose last block the draft model computes again. */
  readonly eagleGroups: ReadonlySet<number>;
  /** Tokens at the end that the draft model may compute again: never cached. */
  readonly reprefillableTokens: number;
  readonly retentionIntervalTokens: number | undefined;
}

export abstract class Coordinator {
  readonly managers: readonly SingleTypeManager[];
  protected readonly options: CoordinatorOptions;

  constructor(options: CoordinatorOptions) {
    this.managers = options.managers;
    this.options = options;
  }

  abstract findLongestCacheHit(hashes: BlockHashes, maxTokens: number): CacheHit;

  /** Make the full blocks among the first `tokens` tokens findable, except those that may be computed again. */
  abstract cacheBlocks(request: CacheRequest, tokens: number): void;

  blocksToAllocate(requestId: string, growth: Growth, computed: GroupBlocks, capped: boolean): number {
    let count = 0;
    for (let group = 0; group < this.managers.length; group++)
      count += this.managers[group]!.blocksToAllocate(requestId, growth, computed[group]!, capped);
    return count;
  }

  blocksBeyondDemand(requestId: string, growth: Growth): number {
    return this.managers.reduce((sum, manager) => sum + manager.blocksBeyondDemand(requestId, growth), 0);
  }

  /** Two phases: all groups hold their hits before any allocates, or an allocation could evict a hit. */
  addComputedBlocks(requestId: string, growth: Growth, computed: GroupBlocks): void {
    this.managers.forEach((manager, group) => {
      manager.addComputedBlocks(requestId, growth, computed[group]!);
    });
    if (growth.computedTokens === growth.localTokens) return;
    for (const manager of this.managers) manager.allocateExternal(requestId, growth);
  }

  allocateBlocks(requestId: string, growth: Growth): GroupBlocks {
    return this.managers.map((manager) => manager.allocateBlocks(requestId, growth));
  }

  removeSkippedBlocks(requestId: string, processedTokens: number, promptTokens?: number): void {
    for (const manager of this.managers) manager.removeSkippedBlocks(requestId, processedTokens, promptTokens);
  }

  /**
   * The hit as a connector may extend it. It differs from `findLongestCacheHit` where states lag behind full attention: a
   * connector can bring the states, so what full attention has is the hit, and `diverged` says that others have less of it.
   */
  findHitForConnector(hashes: BlockHashes, maxTokens: number): ConnectorHit {
    return { ...this.findLongestCacheHit(hashes, maxTokens), diverged: false };
  }

  free(requestId: string): void {
    for (const manager of this.managers) manager.free(requestId);
  }

  tables(requestId: string): GroupBlocks {
    return this.managers.map((manager) => manager.table(requestId));
  }

  newStepStarts(): void {
    for (const manager of this.managers) manager.newStepStarts();
  }

  takeCopies(): BlockCopy[] {
    return this.managers.flatMap((manager) => manager.takeCopies());
  }

  checkIntegrity(): void {
    for (const manager of this.managers) manager.checkIntegrity();
  }

  /** Where later requests can pick up this one's prefix. */
  protected retentionFor(request: CacheRequest): Retention {
    const boundaries: number[] = [];
    if (request.promptTokens !== undefined) boundaries.push(request.promptTokens - 1);
    if (request.sharedPrefixBoundary) boundaries.push(request.sharedPrefixBoundary);
    return { intervalTokens: this.options.retentionIntervalTokens, boundaries };
  }
}

export class UncachedCoordinator extends Coordinator {
  findLongestCacheHit(): CacheHit {
    return { blocks: this.managers.map(() => []), tokens: 0, sharedPrefixBoundary: 0 };
  }

  cacheBlocks(): void {}
}

/** One group. */
export class UnitaryCoordinator extends Coordinator {
  readonly #groups = [0];

  findLongestCacheHit(hashes: BlockHashes, maxTokens: number): CacheHit {
    const manager = this.managers[0]!;
    const { columns, tokens } = manager.findLongestCacheHit({
      hashes,
      maxTokens,
      groups: this.#groups,
      dropEagleBlock: this.options.eagleGroups.has(0),
      alignmentTokens: manager.blockTokens,
    });
    return { blocks: columns, tokens, sharedPrefixBoundary: 0 };
  }

  cacheBlocks(request: CacheRequest, tokens: number): void {
    const finalTokens = Math.max(tokens - this.options.reprefillableTokens, 0);
    if (this.managers[0]!.isCached(request.id, finalTokens)) return;
    this.managers[0]!.cacheBlocks(request, finalTokens, this.retentionFor(request));
  }
}
