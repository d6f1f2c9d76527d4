/**
 * Chunked local attention: a token sees its own chunk only, so a hit needs the blocks since the start of the chunk where
 * it ends, and all before are let go. A hit whose end is the start of a chunk needs no block at all.
 * After vLLM's ChunkedLocalAttentionManager.
 */
import { nullBlock } from './block-pool.ts';
import { type Hit, type HitQuery, type ManagerOptions, SingleTypeManager } from './single-type-manager.ts';

export class ChunkedLocalManager extends SingleTypeManager {
  readonly kind = 'chunked_local_attention';
  readonly #chunkTokens: number;

  constructor(options: ManagerOptions, chunkTokens: number) {
    super(options);
    this.#chunkTokens = chunkTokens;
  }

  findLongestCacheHit({ hashes, maxTokens, groups }: HitQuery): Hit {
    const maxBlocks = Math.floor(maxTokens / this.blockTokens);
    let count = Math.floor(this.skippedTokens(maxTokens) / this.blockTokens);
    const columns = groups.map(() => new Array<number>(count).fill(nullBlock));
    while (count < maxBlocks && this.pool.findEach(hashes, this.hashIndexOf(count), groups, columns)) count++;
    return { columns, tokens: count * this.blockTokens };
  }

  protected override skippedTokens(computedTokens: number): number {
    return computedTokens - (computedTokens % this.#chunkTokens);
  }

  protected override mostBlocksAtOnce(): number {
    const { maxInFlightTokens, maxModelTokens } = this.options;
    return this.blocksFor(Math.min(this.#chunkTokens + maxInFlightTokens, maxModelTokens));
  }
}
