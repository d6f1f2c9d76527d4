/**
 * Full attention: every token attends to all before it, so a hit is the unbroken run of blocks from the root, and no
 * block may be let go while its request runs. With partial hits the run may end inside a block, where a prompt ended.
 * After vLLM's FullAttentionManager.
 */
import type { CacheRequest } from './request.ts';
import {
  type Hit,
  type HitQuery,
  type ManagerOptions,
  type Retention,
  SingleTypeManager,
} from './single-type-manager.ts';

export class FullAttentionManager extends SingleTypeManager {
  readonly kind: string;

  constructor(options: ManagerOptions, kind = 'full_attention') {
    super(options);
    this.kind = kind;
  }

  findLongestCacheHit(query: HitQuery): Hit {
    const { hashes, maxTokens, groups, alignmentTokens } = query;
    const maxBlocks = Math.min(
      Math.floor(maxTokens / this.blockTokens),
      Math.floor(hashes.blockCount / this.hashesPerBlock),
    );
    const columns = this.pool.findRun(hashes, this.hashesPerBlock, maxBlocks, groups);
    let tokens = columns[0]!.length * this.blockTokens;
    if (alignmentTokens < this.blockTokens) tokens = this.#extendInside(query, columns, tokens);
    if (query.dropEagleBlock && tokens > 0) tokens -= Math.min(alignmentTokens, this.blockTokens);
    tokens -= tokens % alignmentTokens;
    for (const column of columns) column.length = this.blocksFor(tokens);
    return { columns, tokens };
  }

  override cacheBlocks(request: CacheRequest, tokens: number, retention: Retention): void {
    super.cacheBlocks(request, tokens, retention);
    this.#cachePromptTail(request, tokens);
  }

  override hasRoom(requestId: string, tokens: number): boolean {
    const table = this.tables.get(requestId);
    return table !== undefined && table.partialHit === undefined && table.blocks.length * this.blockTokens >= tokens;
  }

  override isCached(requestId: string, tokens: number): boolean {
    const table = this.tables.get(requestId);
    if (table === undefined || this.options.hashTokens !== this.blockTokens) return false;
    return Math.floor(tokens / this.blockTokens) <= table.cachedCount;
  }

  override commonPrefixBlocks(requestId: string): number {
    const blocks = this.table(requestId);
    let count = 0;
    while (count < blocks.length && this.#allHave(count, blocks[count]!)) count++;
    return count;
  }

  /** Not by reference counts, as in vLLM: pins, exports and copies hold blocks, too. */
  #allHave(at: number, block: number): boolean {
    if (this.pool.refCount(block) < this.tables.size) return false;
    for (const { blocks } of this.tables.values()) if (blocks[at] !== block) return false;
    return true;
  }

  /** The highest hash boundary inside the next block that is findable. */
  #extendInside(query: HitQuery, columns: number[][], tokens: number): number {
    const { hashTokens } = this.options;
    const last = Math.min(query.maxTokens, tokens + this.blockTokens - 1, query.hashes.blockCount * hashTokens);
    for (let end = last - (last % hashTokens); end > tokens; end -= hashTokens)
      if (this.pool.findEach(query.hashes, end / hashTokens - 1, query.groups, columns)) return end;
    return tokens;
  }

  /** Where the prompt ends inside a block: its last hash boundary is findable too. */
  #cachePromptTail(request: CacheRequest, tokens: number): void {
    const { hashTokens, group } = this.options;
    if (hashTokens === this.blockTokens || request.promptTokens === undefined) return;
    const end = request.promptTokens - (request.promptTokens % hashTokens);
    if (end % this.blockTokens === 0 || tokens < end) return;
    const block = this.table(request.id)[Math.floor(end / this.blockTokens)]!;
    const { replaceDuplicates } = this.options;
    // Where nothing is held twice, the one that came first stays the one that is found.
    if (replaceDuplicates && this.pool.findOther(request.hashes, end / hashTokens - 1, group, block) !== undefined)
      return;
    this.pool.cachePartialBlock({ request, block, tokens: end, hashTokens, group, kind: this.kind });
  }
}
