/**
 * The engine's prefix cache over a radix tree, in place of KvCacheManager; after SGLang's RadixCache and its requests'
 * life, in the calls of `PrefixCache`:
 *
 *   getComputedBlocks   match_prefix: walks the tree, and splits a node where the answer ends inside it
 *   allocateSlots       locks the matched path; evicts leaves where free pages do not suffice
 *   cacheBlocks         cache_unfinished_req: full pages enter the tree as soon as their content is there, those of the
 *                       prompt and of the answer. Pages that another request entered first are exchanged in the table,
 *                       and ours are free: content is never in the tree twice
 *   free                cache_finished_req: the path is unlocked, a tail that is no full page is free
 *
 * A page is one of the executor's blocks: the executor addresses whole blocks, so the engine shares prefixes to the
 * block. The structure below takes pages of any size (radix-tree.ts).
 *
 * Invariant: every page but the null block is in the free list, or in the tree, or in the private part of one table.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';
import { nullBlock } from '../block-pool.ts';
import type { CacheHit, GroupBlocks } from '../coordinator.ts';
import { EventLog, type KvCacheEvent, type PackedEvents } from '../events.ts';
import { heldEvents } from '../held-events.ts';
import type { AllocateOptions, PrefixCache, PrefixCacheRequest } from '../prefix-cache.ts';
import { PrefixCacheStats, type PrefixCacheStatsSnapshot } from '../stats.ts';
import type { RadixPolicy } from './eviction-queue.ts';
import type { RadixNode } from './radix-node.ts';
import { RadixTree } from './radix-tree.ts';

export interface RadixCacheOptions {
  /** Physical blocks, the null block (0) included. */
  readonly blockCount: number;
  /** Tokens per block: the tree's page. */
  readonly blockTokens: number;
  readonly maxModelTokens: number;
  readonly enableCaching?: boolean;
  /** Default 'lru'. */
  readonly policy?: RadixPolicy;
  /** Evict no more of a leaf than is needed; default true. false: whole nodes, as SGLang, with fewer hits. */
  readonly trimLeaves?: boolean;
  /** Collect events for takeEvents; default off. They need the request's hashes, one per block. */
  readonly enableEvents?: boolean;
}

/** What a request holds. */
interface Table {
  readonly blocks: number[];
  /** Leading blocks that are in the tree. */
  cachedBlocks: number;
  /** Ends where those end; locked. undefined: there are none. */
  node: RadixNode | undefined;
}

const noBlocks: GroupBlocks = [[]];
const noHit: CacheHit = { blocks: noBlocks, tokens: 0, sharedPrefixBoundary: 0 };

export class RadixCache implements PrefixCache {
  readonly blockTokens: number;
  readonly blockCount: number;
  readonly groupCount = 1;
  readonly #maxModelTokens: number;
  readonly #enableCaching: boolean;
  readonly #tree: RadixTree;
  readonly #tables = new Map<string, Table>();
  /** A stack: what was free last is used first. */
  readonly #free: number[] = [];
  readonly #events: EventLog;
  /** By block, for its BlockRemoved; only when events are on. */
  readonly #hashes: (HashKey | undefined)[] = [];
  readonly #stats = new PrefixCacheStats();

  constructor(options: RadixCacheOptions) {
    const { blockCount, blockTokens, policy = 'lru', trimLeaves = true } = options;
    invariant(Number.isInteger(blockCount) && blockCount >= 1, () => `radix cache: ${blockCount} blocks`);
    this.blockTokens = blockTokens;
    this.blockCount = blockCount;
    this.#maxModelTokens = options.maxModelTokens;
    this.#enableCaching = options.enableCaching ?? true;
    this.#events = new EventLog(options.enableEvents ?? false);
    this.#tree = new RadixTree({ pageTokens: blockTokens, pageLimit: blockCount, policy, trimLeaves });
    for (let block = blockCount - 1; block > nullBlock; block--) this.#free.push(block);
  }

  get freeBlockCount(): number {
    return this.#free.length + this.#tree.evictablePages;
  }

  get cachedBlockCount(): number {
    return this.#tree.pageCount;
  }

  getComputedBlocks(request: PrefixCacheRequest): CacheHit {
    if (!this.#enableCaching || request.skipReadingPrefixCache) return noHit;
    // The last token is computed in any case, for its logits.
    const { node, pageCount } = this.#tree.match(request.tokenIds(0, request.tokenCount - 1), request.extraKey);
    if (!node) return noHit;
    return { blocks: [this.#tree.pathPages(node)], tokens: pageCount * this.blockTokens, sharedPrefixBoundary: 0 };
  }

  allocateSlots(request: PrefixCacheRequest, newTokens: number, options: AllocateOptions = {}): GroupBlocks | null {
    const { computed = noHit, externalComputedTokens: external = 0, lookaheadTokens = 0 } = options;
    invariant(newTokens > 0 || external > 0, () => `request ${request.id}: nothing to allocate for`);
    const hit = computed.blocks[0]!;
    const held = this.#tables.get(request.id);
    invariant(hit.length === 0 || !held, () => `request ${request.id}: a hit for a request that holds blocks`);
    const node = hit.length > 0 ? this.#tree.nodeOf(hit.at(-1)!) : undefined;
    invariant(hit.length === (node?.endPages ?? 0), () => `request ${request.id}: a hit that is not in the tree`);

    const computedTokens = Math.min(request.computedTokens + computed.tokens + external, this.#maxModelTokens);
    const endTokens = computedTokens + newTokens;
    const heldBlocks = held?.blocks.length ?? hit.length;
    const hitPages = node ? this.#tree.unlockedPages(node) : 0;
    const blocksFor = (tokens: number): number =>
      Math.max(Math.ceil(Math.min(tokens, this.#maxModelTokens) / this.blockTokens) - heldBlocks, 0);
    const fits = (tokens: number, free: number): boolean => blocksFor(tokens) + hitPages <= free;
    if (options.fullSequenceMustFit && !fits(request.tokenCount, this.freeBlockCount)) return null;
    if (!fits(endTokens + lookaheadTokens, this.freeBlockCount - (options.reservedBlocks ?? 0))) return null;

    const table = held ?? { blocks: [...hit], cachedBlocks: hit.length, node };
    if (!held) this.#tables.set(request.id, table);
    if (!held && node) {
      this.#tree.recordHit(node, request.priority);
      this.#tree.lock(node);
    }
    const added = this.#allocate(blocksFor(endTokens + lookaheadTokens));
    for (const block of added) table.blocks.push(block);
    if (!options.delayCacheBlocks) this.cacheBlocks(request, Math.min(endTokens, request.tokenCount));
    return [added];
  }

  cacheBlocks(request: PrefixCacheRequest, tokens: number): void {
    const table = this.#tables.get(request.id);
    const first = table?.cachedBlocks ?? 0;
    const end = Math.floor(tokens / this.blockTokens);
    if (!this.#enableCaching || !table || end <= first) return;
    const { blocks, node: before } = table;
    invariant(end <= blocks.length, () => `request ${request.id}: caches ${end} blocks of ${blocks.length}`);
    const own = blocks.slice(first, end);
    const sequence = request.tokenIds(first * this.blockTokens, end * this.blockTokens);
    const { extraKey, priority = 0 } = request;
    const { node, duplicatePages } = this.#tree.insert(sequence, own, { extraKey, priority, after: before });
    if (node !== before) {
      this.#tree.lock(node!);
      if (before) this.#tree.unlock(before);
    }
    table.node = node;
    table.cachedBlocks = end;
    if (duplicatePages > 0) {
      const cached = this.#tree.pathPages(node!);
      for (let i = 0; i < duplicatePages; i++) {
        this.#free.push(own[i]!);
        blocks[first + i] = cached[first + i]!;
      }
    }
    if (this.#events.enabled) this.#announce(request, table, first + duplicatePages, end);
  }

  free(requestId: string): void {
    const table = this.#tables.get(requestId);
    if (!table) return;
    this.#tables.delete(requestId);
    const { node, blocks, cachedBlocks } = table;
    if (node) {
      if (!node.isForgotten) this.#tree.touch(node);
      this.#tree.unlock(node);
    }
    for (let i = blocks.length - 1; i >= cachedBlocks; i--) this.#free.push(blocks[i]!);
  }

  blockTables(requestId: string): GroupBlocks {
    const table = this.#tables.get(requestId);
    return table ? [table.blocks] : noBlocks;
  }

  blockTable(requestId: string): readonly number[] {
    return this.#tables.get(requestId)?.blocks ?? noBlocks[0]!;
  }

  /** Full attention looks at everything. */
  skippedBlocks(): number {
    return 0;
  }

  covers(): boolean {
    return true;
  }

  blocksToFinish(request: PrefixCacheRequest): number {
    const held = this.#tables.get(request.id)?.blocks.length ?? 0;
    return Math.max(Math.ceil(request.tokenCount / this.blockTokens) - held, 0);
  }

  heldBlocks({ blocks }: CacheHit): number {
    const [hit] = blocks;
    const node = hit!.length > 0 ? this.#tree.nodeOf(hit!.at(-1)!) : undefined;
    return node ? hit!.length - this.#tree.unlockedPages(node) : 0;
  }

  /** The whole chain up to the last of the blocks is held: it would be of no use without what comes before it. */
  hold(blocks: readonly number[]): () => void {
    const node = this.#tree.nodeOf(blocks.at(-1)!);
    invariant(node, () => `radix cache: block ${blocks.at(-1)} is to be held and not cached`);
    this.#tree.hold(node);
    return () => this.#tree.release(node);
  }

  /** Also what else begins with the same block. Until they are evicted, `cachedBlockCount` has these blocks. */
  forget(request: PrefixCacheRequest, suspects: GroupBlocks): void {
    const { tokenCount, extraKey } = request;
    // Else they have been forgotten, or evicted, and what is there is somebody's who computed it anew.
    if (!suspects[0]!.some((block) => this.#tree.nodeOf(block)?.isForgotten === false)) return;
    for (const pages of this.#tree.forget(request.tokenIds(0, tokenCount), extraKey)) this.#tellRemoved(pages);
  }

  /** Forget everything cached; false, and nothing done, while any block is held. */
  resetPrefixCache(): boolean {
    if (this.#tables.size > 0 || this.#tree.protectedPages > 0) return false;
    this.#tree.evict(this.blockCount, (pages) => {
      for (const page of pages) this.#free.push(page);
    });
    this.#hashes.length = 0;
    this.#events.add({ type: 'AllBlocksCleared' });
    this.#stats.recordReset();
    return true;
  }

  recordLookup(queriedTokens: number, hitTokens: number, preempted: boolean): void {
    if (this.#enableCaching) this.#stats.recordLookup(queriedTokens, hitTokens, preempted);
  }

  takeStats(): PrefixCacheStatsSnapshot {
    return this.#stats.take();
  }

  takePackedEvents(): PackedEvents {
    return this.#events.takePacked();
  }

  heldEvents(): Iterable<readonly KvCacheEvent[]> {
    const hashes = this.#hashes.slice();
    const kind = { kind: 'full_attention', windowTokens: null };
    return heldEvents([{ group: 0, ...kind, rows: [...hashes.keys()], keyOf: (block) => hashes[block] }]);
  }

  takeEvents(): KvCacheEvent[] {
    return this.#events.take();
  }

  /** O(tokens). Throws InvariantError at the first thing that does not hold. */
  checkIntegrity(): void {
    this.#tree.checkIntegrity();
    const seen = new Uint8Array(this.blockCount);
    const claim = (block: number, where: string): void => {
      invariant(block > nullBlock && block < this.blockCount, () => `radix cache: there is no block ${block}`);
      invariant(seen[block] === 0, () => `radix cache: block ${block} is ${where} and somewhere else`);
      seen[block] = 1;
    };
    for (const block of this.#free) claim(block, 'free');
    for (const [id, { blocks, cachedBlocks, node }] of this.#tables) {
      invariant(cachedBlocks === (node?.endPages ?? 0), () => `request ${id}: its node ends elsewhere`);
      const path = node ? this.#tree.pathPages(node) : [];
      invariant(
        path.every((page, i) => page === blocks[i]),
        () => `request ${id}: its table is not its path`,
      );
      invariant(!node || node.lockRefs > 0, () => `request ${id}: its path is not locked`);
      for (let i = cachedBlocks; i < blocks.length; i++) claim(blocks[i]!, `private to ${id}`);
    }
    for (let block = 1; block < this.blockCount; block++) {
      const inTree = this.#tree.nodeOf(block) !== undefined;
      invariant(inTree !== (seen[block] === 1), () => `radix cache: block ${block} is ${inTree ? 'twice' : 'nowhere'}`);
    }
  }

  #allocate(count: number): number[] {
    const missing = count - this.#free.length;
    if (missing > 0) this.#tree.evict(missing, (pages) => this.#evicted(pages));
    invariant(count <= this.#free.length, () => `radix cache: ${count} blocks wanted, ${this.#free.length} free`);
    const blocks: number[] = [];
    for (let i = 0; i < count; i++) blocks.push(this.#free.pop()!);
    return blocks;
  }

  /** The last page goes on the free list first, so that a chain's pages are used again in its order. */
  #evicted(pages: Int32Array): void {
    for (let i = pages.length - 1; i >= 0; i--) this.#free.push(pages[i]!);
    this.#tellRemoved(pages);
  }

  /** Those that are found no more; of what was forgotten before, everybody has heard. */
  #tellRemoved(pages: Int32Array): void {
    if (!this.#events.enabled) return;
    const blockHashes: HashKey[] = [];
    for (const page of pages) {
      const hash = this.#hashes[page];
      if (hash === undefined) continue;
      blockHashes.push(hash);
      this.#hashes[page] = undefined;
    }
    if (blockHashes.length > 0) this.#events.add({ type: 'BlockRemoved', blockHashes, medium: 'GPU', groupIdx: 0 });
  }

  /** One BlockStored for the blocks that are new in the tree. */
  #announce(request: PrefixCacheRequest, { blocks, node }: Table, first: number, end: number): void {
    if (first === end || node!.isForgotten) return;
    const { hashes, description } = request;
    const { blockTokens } = this;
    const blockHashes: HashKey[] = [];
    const extraKeys: (readonly unknown[] | null)[] = [];
    for (let i = first; i < end; i++) {
      const hash = hashes.keyAt(i);
      this.#hashes[blocks[i]!] = hash;
      blockHashes.push(hash);
      extraKeys.push(description?.extraKeys(i * blockTokens, (i + 1) * blockTokens) ?? null);
    }
    this.#events.add({
      type: 'BlockStored',
      blockHashes,
      parentBlockHash: first === 0 ? null : hashes.keyAt(first - 1),
      tokenIds: [...request.tokenIds(first * blockTokens, end * blockTokens)],
      blockSize: blockTokens,
      loraId: description?.loraId ?? null,
      loraName: description?.loraName ?? null,
      medium: 'GPU',
      extraKeys,
      groupIdx: 0,
      kvCacheSpecKind: 'full_attention',
      kvCacheSpecSlidingWindow: null,
    });
  }
}
