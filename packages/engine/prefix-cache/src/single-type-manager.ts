/**
 * The blocks of all requests for one attention group: what is common to every attention type. What differs is which
 * blocks a hit needs (`findLongestCacheHit`), how many tokens at the front nobody looks at any more (`skippedTokens`),
 * and which full blocks are worth finding again (`worthCaching`).
 *
 *     table:  null null null | held held held held     null: skipped by the window, or never there
 *             └── skipped ──┘         ▲ cachedCount: blocks before it are findable, or were not worth it
 *
 * Invariant: a table only grows, and its entries only turn to null or are replaced by a copy; `blocksToAllocate` is never
 * less, with `blocksBeyondDemand`, than what the admission then takes from the free queue.
 * After vLLM's SingleTypeKVCacheManager.
 */
import { invariant } from '@kvtier/errors';
import { type BlockPool, nullBlock } from './block-pool.ts';
import type { FullBlocks } from './full-blocks.ts';
import type { BlockHashes, CacheRequest } from './request.ts';

export interface Table {
  readonly blocks: number[];
  /** Leading blocks that are findable, were hits, or were passed over; cacheBlocks goes on from here. */
  cachedCount: number;
  /** Place of a hit block that is shared only in part: allocation replaces it with a copy. */
  partialHit: number | undefined;
}

/** What a lookup asks for. */
export interface HitQuery {
  readonly hashes: BlockHashes;
  readonly maxTokens: number;
  /** Groups of one spec, looked up together: a block counts when all of them have it. */
  readonly groups: readonly number[];
  /** The draft model needs the last block computed again: look for one more and drop it. */
  readonly dropEagleBlock: boolean;
  /** The hit must end on a multiple of this. */
  readonly alignmentTokens: number;
}

export interface Hit {
  /** One column per group of the query, in chain order, null blocks where nothing is needed. */
  readonly columns: number[][];
  readonly tokens: number;
}

/** How far a request grows. */
export interface Growth {
  /** Room wanted, tokens that may be drafted ahead included. */
  readonly tokens: number;
  /** The same without those. */
  readonly mainModelTokens: number;
  /** Tokens computed before this step: held, hit or loaded from outside. */
  readonly computedTokens: number;
  /** The same without those from outside. */
  readonly localTokens: number;
  /** Tokens of the encoder's input, for cross attention. */
  readonly encoderTokens: number;
}

/** Which boundaries a later request can reach; decides what sparse groups keep. */
export interface Retention {
  /** Undefined: every aligned boundary; 0: only `boundaries`; else also every multiple. Tokens. */
  readonly intervalTokens: number | undefined;
  readonly boundaries: readonly number[];
}

/** The worker must copy a block before the step runs. */
export interface BlockCopy {
  readonly source: number;
  readonly target: number;
}

/** The state at the end of a prompt, in a block of its own now: a connector may store it as the hash of `tokens` tokens. */
export interface PartialTailOffload {
  readonly requestId: string;
  readonly group: number;
  readonly block: number;
  readonly tokens: number;
}

export interface ManagerOptions {
  readonly pool: BlockPool;
  readonly group: number;
  /** Tokens per block, context parallelism included. */
  readonly blockTokens: number;
  /** Tokens per hash; divides blockTokens. */
  readonly hashTokens: number;
  /** Hits end on multiples of this: what sparse groups keep is laid out by it. */
  readonly alignmentTokens: number;
  readonly useEagle: boolean;
  /** Hits may end inside a block, at a hash boundary. */
  readonly partialHits: boolean;
  /** Most tokens that can be in flight for one request, and its most tokens at all: bound the admission gate. */
  readonly maxInFlightTokens: number;
  readonly maxModelTokens: number;
  /** Remember which blocks are new to a request, for an executor that must zero them. Default no. */
  readonly recordNewBlocks?: boolean;
  /** A block that fills up with content which another one holds already gives way to it. Default no. */
  readonly replaceDuplicates?: boolean;
}

const noBlocks: readonly number[] = [];

export abstract class SingleTypeManager {
  /** Attention type as events name it. */
  abstract readonly kind: string;
  readonly blockTokens: number;
  protected readonly pool: BlockPool;
  protected readonly options: ManagerOptions;
  protected readonly tables = new Map<string, Table>();
  protected readonly hashesPerBlock: number;
  #copies: BlockCopy[] = [];
  /** Allocated and not written yet; only when they are recorded. At most all blocks. */
  readonly #newBlocks = new Set<number>();

  constructor(options: ManagerOptions) {
    this.options = options;
    this.pool = options.pool;
    this.blockTokens = options.blockTokens;
    this.hashesPerBlock = options.blockTokens / options.hashTokens;
  }

  /** Longest prefix held, at most `maxTokens`. Nothing is touched. */
  abstract findLongestCacheHit(query: HitQuery): Hit;

  /** For events; null for all but windows. */
  get windowTokens(): number | null {
    return null;
  }

  /** Requests that have a table. */
  get requestCount(): number {
    return this.tables.size;
  }

  /**
   * Blocks that leave the free queue when the request grows, given that `computed` blocks (a hit) are taken over: a hit
   * on a free block counts, because it is taken out of the queue too. `capped`: count no more than the request can hold
   * at any one time, for the admission gate.
   */
  blocksToAllocate(requestId: string, growth: Growth, computed: readonly number[], capped: boolean): number {
    const held = this.tables.get(requestId)?.blocks.length ?? 0;
    const required = Math.min(this.blocksFor(growth.tokens), capped ? this.mostBlocksAtOnce() : Infinity);
    // A request that runs holds its skipped blocks as null entries; only a first admission may pass over blocks.
    const skipped = held > 0 ? 0 : this.skippedBlocks(growth.computedTokens);
    const fresh = Math.max(required - Math.max(skipped, computed.length + held), 0);
    return fresh + this.freeAmong(computed, skipped) + (this.#endsInside(growth.localTokens, computed) ? 1 : 0);
  }

  /** Blocks that an admission takes on top of `blocksToAllocate`: where vLLM's own prediction, which decides, is short. */
  blocksBeyondDemand(_requestId: string, _growth: Growth): number {
    return 0;
  }

  /** First phase of an admission: hold the hit and start the table with it; blocks that the window skips stay null. */
  addComputedBlocks(requestId: string, growth: Growth, computed: readonly number[]): void {
    if (computed.length === 0 && this.tables.has(requestId)) return;
    invariant(!this.tables.has(requestId), () => `request ${requestId}: a hit may only start a table`);
    const skipped = this.skippedBlocks(growth.computedTokens);
    const kept = computed.slice(skipped);
    this.pool.touchHit(kept);
    const blocks = [...new Array<number>(skipped).fill(nullBlock), ...kept];
    const partialHit =
      kept.length > 0 && this.#endsInside(growth.localTokens, computed) ? blocks.length - 1 : undefined;
    this.tables.set(requestId, { blocks, cachedCount: partialHit ?? blocks.length, partialHit });
  }

  /** Second phase: room for what a connector loads, as far as the window sees it. */
  allocateExternal(requestId: string, growth: Growth): void {
    const { blocks } = this.tableFor(requestId);
    this.#append(blocks, this.blocksFor(growth.computedTokens) - blocks.length);
  }

  /** Grow the table; returns only the blocks added, a copy's target first. */
  allocateBlocks(requestId: string, growth: Growth): number[] {
    const table = this.tableFor(requestId);
    const target = this.replacePartialHit(table);
    const added = this.#append(table.blocks, this.blocksFor(growth.tokens) - table.blocks.length);
    return target === undefined ? added : [target, ...added];
  }

  /** Make the full blocks among the first `tokens` tokens findable. */
  cacheBlocks(request: CacheRequest, tokens: number, retention: Retention): void {
    const table = this.tables.get(request.id);
    invariant(table, () => `request ${request.id}: has no blocks to cache`);
    let first = table.cachedCount;
    const end = Math.floor(tokens / this.blockTokens);
    if (end <= first) return;
    const { blocks } = table;
    invariant(end <= blocks.length, () => `request ${request.id}: ${end} full blocks in a table of ${blocks.length}`);
    let keep = this.worthCaching(first, end, retention);
    if (this.options.replaceDuplicates) {
      const replaced = this.#replaceDuplicates(request, blocks, first, end);
      const worth = keep;
      if (replaced.size > 0) keep = (i) => !replaced.has(i) && (worth === undefined || worth(i));
      while (replaced.has(first)) first++; // the event begins where something is new
    }
    this.pool.cacheFullBlocks(this.#fullBlocks(request, first, end, keep));
    table.cachedCount = end;
  }

  /** Tell of the first `count` blocks of a table, which were hits. */
  reportHits(request: CacheRequest, count: number): void {
    this.pool.reportCached(this.#fullBlocks(request, 0, Math.min(count, this.table(request.id).length)));
  }

  /** Let go of blocks that no later token looks at. `promptTokens`: undefined where the request does not say. */
  removeSkippedBlocks(requestId: string, processedTokens: number, _promptTokens?: number): void {
    this.removeBlocks(requestId, 0, this.skippedBlocks(processedTokens));
  }

  /** Take the request's table away; its blocks stay held until the caller releases them. In the table's order. */
  pop(requestId: string): number[] {
    const blocks = this.tables.get(requestId)?.blocks ?? [];
    this.tables.delete(requestId);
    return blocks.filter((block) => block !== nullBlock);
  }

  /** Let the request's blocks go, last one first, so that a chain is evicted from its tail. Unknown ids are fine. */
  free(requestId: string): void {
    const table = this.tables.get(requestId);
    if (!table) return;
    this.tables.delete(requestId);
    this.pool.release(table.blocks.reverse());
  }

  /** The request's table; empty when there is none. */
  table(requestId: string): readonly number[] {
    return this.tables.get(requestId)?.blocks ?? noBlocks;
  }

  /** Leading blocks that the token after the first `tokens` tokens does not look at. */
  skippedBlocks(tokens: number): number {
    return Math.max(Math.floor(this.skippedTokens(tokens) / this.blockTokens), 0);
  }

  /** The table has every block that the tokens after the first `tokens` tokens look at or go to. */
  covers(requestId: string, tokens: number): boolean {
    const blocks = this.table(requestId);
    return blocks.length * this.blockTokens >= tokens && !blocks.includes(nullBlock, this.skippedBlocks(tokens));
  }

  /** Leading blocks of this request that every request with blocks shares. */
  commonPrefixBlocks(_requestId: string): number {
    return 0;
  }

  /** The request holds room for its first `tokens` tokens already, and growing to there would change nothing. May say no. */
  hasRoom(_requestId: string, _tokens: number): boolean {
    return false;
  }

  /** Caching the first `tokens` tokens of a request would change nothing. May say no. */
  isCached(_requestId: string, _tokens: number): boolean {
    return false;
  }

  newStepStarts(): void {}

  /** Since the last step began; each is held by its copy until that is released. */
  takeTailOffloads(): PartialTailOffload[] {
    return [];
  }

  /** Copies to make before the step runs. Source and target of each stay held until the caller releases them. */
  takeCopies(): BlockCopy[] {
    const copies = this.#copies;
    this.#copies = [];
    return copies;
  }

  /** The part of a table that holds the first `tokens` tokens. States are no run of tokens: all of them. */
  blocksOfTokens(requestId: string, tokens: number): readonly number[] {
    return this.table(requestId).slice(0, this.blocksFor(tokens));
  }

  /** Tokens up to the end of the last block of this request that is findable. */
  cachedTokens(requestId: string): number {
    let most = 0;
    for (const block of this.table(requestId)) most = Math.max(most, this.pool.hashTokensOf(block));
    return most;
  }

  /** Blocks of tokens first..end-1 of a request that have been allocated and not taken by `takeNewBlocks`. */
  newBlocksBetween(requestId: string, first: number, end: number): number[] {
    const blocks = this.table(requestId).slice(Math.floor(first / this.blockTokens), this.blocksFor(end));
    return blocks.filter((block) => this.#newBlocks.has(block));
  }

  /** The blocks of a request from token `first` on hold nothing: their load has failed. */
  recordForZeroing(requestId: string, first: number): void {
    if (!this.options.recordNewBlocks) return;
    for (const block of this.table(requestId).slice(Math.floor(first / this.blockTokens)))
      if (block !== nullBlock) this.#newBlocks.add(block);
  }

  /** Blocks allocated since the last call, in that order; [] unless they are recorded. */
  takeNewBlocks(): number[] {
    const blocks = [...this.#newBlocks];
    this.#newBlocks.clear();
    return blocks;
  }

  checkIntegrity(): void {
    const holders = new Map<number, number>();
    for (const [requestId, { blocks, cachedCount }] of this.tables) {
      invariant(cachedCount <= blocks.length, () => `request ${requestId}: more blocks cached than held`);
      for (const block of blocks) if (block !== nullBlock) holders.set(block, (holders.get(block) ?? 0) + 1);
    }
    // Others (exports, copies) may hold blocks besides the tables, so the pool's count is an upper bound.
    for (const [block, count] of holders) {
      const refs = this.pool.refCount(block);
      invariant(refs >= count, () => `block ${block}: in ${count} tables with ${refs} references`);
    }
  }

  /** Leading tokens that the token after the first `computedTokens` does not look at. */
  protected skippedTokens(_computedTokens: number): number {
    return 0;
  }

  /** Which of the blocks first..end-1 a later hit can need; undefined: all. */
  protected worthCaching(_first: number, _end: number, _retention: Retention): ((i: number) => boolean) | undefined {
    return undefined;
  }

  /** The most blocks that one request holds at any one time. */
  protected mostBlocksAtOnce(): number {
    return Infinity;
  }

  /** Entries first..end-1 of a table, found backwards up to the first that is null: before that one all are. */
  protected removeBlocks(requestId: string, first: number, end: number): void {
    const blocks = this.tables.get(requestId)?.blocks;
    if (!blocks) return;
    const removed: number[] = [];
    for (let i = Math.min(end, blocks.length) - 1; i >= first; i--) {
      if (blocks[i] === nullBlock) break;
      removed.push(blocks[i]!);
      blocks[i] = nullBlock;
    }
    if (removed.length > 0) this.pool.release(removed);
  }

  /** Blocks from the pool, recorded as new where that is asked for. */
  protected allocate(count: number): number[] {
    const blocks = this.pool.allocate(count);
    if (this.options.recordNewBlocks) for (const block of blocks) this.#newBlocks.add(block);
    return blocks;
  }

  protected blocksFor(tokens: number): number {
    return Math.ceil(tokens / this.blockTokens);
  }

  protected tableFor(requestId: string): Table {
    let table = this.tables.get(requestId);
    if (!table) {
      table = { blocks: [], cachedCount: 0, partialHit: undefined };
      this.tables.set(requestId, table);
    }
    return table;
  }

  /** The hash of block `i`: the last one inside it. */
  protected hashIndexOf(i: number): number {
    return (i + 1) * this.hashesPerBlock - 1;
  }

  protected freeAmong(blocks: readonly number[], first = 0): number {
    let count = 0;
    for (let i = first; i < blocks.length; i++) if (this.pool.isFree(blocks[i]!)) count++;
    return count;
  }

  /** A hit that ends inside a block: take a block to copy it to. The source keeps the hit's reference until then. */
  protected replacePartialHit(table: Table): number | undefined {
    const at = table.partialHit;
    if (at === undefined) return undefined;
    table.partialHit = undefined;
    const target = this.pool.allocate(1)[0]!;
    this.pool.touch([target]);
    this.addCopy(table.blocks[at]!, target);
    table.blocks[at] = target;
    return target;
  }

  /** One reference of each, source and target, passes to the copy. */
  protected addCopy(source: number, target: number): void {
    this.#copies.push({ source, target });
  }

  #append(blocks: number[], count: number): number[] {
    const added = this.allocate(Math.max(count, 0));
    for (const block of added) blocks.push(block);
    return added;
  }

  /** Places of a table that name another block with the same content from now on; what was there is let go. */
  #replaceDuplicates(request: CacheRequest, blocks: number[], first: number, end: number): ReadonlySet<number> {
    const replaced = new Set<number>();
    const own: number[] = [];
    for (let i = first; i < end; i++) {
      const block = blocks[i]!;
      if (block === nullBlock) continue;
      const other = this.pool.findOther(request.hashes, this.hashIndexOf(i), this.options.group, block);
      if (other === undefined) continue;
      this.pool.touchHit([other]);
      own.push(block);
      blocks[i] = other;
      replaced.add(i);
    }
    this.pool.release(own.reverse());
    return replaced;
  }

  #fullBlocks(request: CacheRequest, first: number, end: number, keep?: (i: number) => boolean): FullBlocks {
    const { group, hashTokens } = this.options;
    const { blockTokens, kind, windowTokens } = this;
    const table = this.table(request.id);
    return { request, table, first, end, blockTokens, hashTokens, group, kind, windowTokens, keep };
  }

  #endsInside(localTokens: number, computed: readonly number[]): boolean {
    return computed.length > 0 && localTokens % this.blockTokens !== 0;
  }
}
