/**
 * Full attention: every token attends to all before it, so a hit is the unbroken run of blocks from the root, and no
 * block may be let go while its request runs. After vLLM's FullAttentionManager.
 */
import { invariant } from '@kvtier/errors';
import type { BlockPool } from './block-pool.ts';
import type { BlockHashes, CacheRequest } from './request.ts';
import type { SingleTypeManager } from './single-type-manager.ts';

interface Table {
  readonly blocks: number[];
  /** Leading blocks that are findable or were hits; the rest of the full ones is registered by cacheBlocks. */
  cachedCount: number;
}

const noBlocks: readonly number[] = [];

export class FullAttentionManager implements SingleTypeManager {
  readonly kind = 'full_attention';
  readonly blockTokens: number;
  readonly #pool: BlockPool;
  readonly #group: number;
  readonly #tables = new Map<string, Table>();

  constructor(pool: BlockPool, group: number, blockTokens: number) {
    this.#pool = pool;
    this.#group = group;
    this.blockTokens = blockTokens;
  }

  get requestCount(): number {
    return this.#tables.size;
  }

  findLongestCacheHit(hashes: BlockHashes, maxTokens: number): number[] {
    const blocks: number[] = [];
    const maxBlocks = Math.min(Math.floor(maxTokens / this.blockTokens), hashes.blockCount);
    for (let i = 0; i < maxBlocks; i++) {
      const block = this.#pool.find(hashes.keyAt(i), this.#group);
      if (block === undefined) break;
      blocks.push(block);
    }
    return blocks;
  }

  blocksToAllocate(requestId: string, tokens: number, computed: readonly number[]): number {
    const held = this.#tables.get(requestId)?.blocks.length ?? 0;
    let count = Math.max(this.#blocksFor(tokens) - held - computed.length, 0);
    for (const block of computed) if (this.#pool.isFree(block)) count++;
    return count;
  }

  addComputedBlocks(requestId: string, computed: readonly number[]): void {
    invariant(!this.#tables.has(requestId), () => `request ${requestId}: a hit may only start a table`);
    this.#pool.touch(computed);
    this.#tables.set(requestId, { blocks: [...computed], cachedCount: computed.length });
  }

  allocateBlocks(requestId: string, tokens: number): number[] {
    let table = this.#tables.get(requestId);
    if (!table) {
      table = { blocks: [], cachedCount: 0 };
      this.#tables.set(requestId, table);
    }
    const added = this.#pool.allocate(Math.max(this.#blocksFor(tokens) - table.blocks.length, 0));
    for (const block of added) table.blocks.push(block);
    return added;
  }

  cacheBlocks(request: CacheRequest, tokens: number): void {
    const table = this.#tables.get(request.id);
    invariant(table, () => `request ${request.id}: has no blocks to cache`);
    const first = table.cachedCount;
    const end = Math.floor(tokens / this.blockTokens);
    if (end <= first) return;
    const { blocks } = table;
    invariant(end <= blocks.length, () => `request ${request.id}: ${end} full blocks in a table of ${blocks.length}`);
    const { blockTokens, kind } = this;
    this.#pool.cacheFullBlocks({ request, table: blocks, first, end, blockTokens, group: this.#group, kind });
    table.cachedCount = end;
  }

  free(requestId: string): void {
    const table = this.#tables.get(requestId);
    if (!table) return;
    this.#tables.delete(requestId);
    this.#pool.release(table.blocks.reverse());
  }

  table(requestId: string): readonly number[] {
    return this.#tables.get(requestId)?.blocks ?? noBlocks;
  }

  commonPrefixBlocks(requestId: string): number {
    const blocks = this.table(requestId);
    let count = 0;
    while (count < blocks.length && this.#pool.refCount(blocks[count]!) === this.#tables.size) count++;
    return count;
  }

  checkIntegrity(): void {
    const holders = new Map<number, number>();
    for (const [requestId, { blocks, cachedCount }] of this.#tables) {
      invariant(cachedCount <= blocks.length, () => `request ${requestId}: more blocks cached than held`);
      for (const block of blocks) holders.set(block, (holders.get(block) ?? 0) + 1);
    }
    // Others (exports) may hold blocks besides the tables, so the pool's count is an upper bound.
    for (const [block, count] of holders) {
      const refs = this.#pool.refCount(block);
      invariant(refs >= count, () => `block ${block}: in ${count} tables with ${refs} references`);
    }
  }

  #blocksFor(tokens: number): number {
    return Math.ceil(tokens / this.blockTokens);
  }
}
