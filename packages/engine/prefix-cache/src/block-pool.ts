/**
 * The physical blocks of one engine: who holds them (reference counts), which are free and in what order they are
 * reused, and which hash each one carries.
 *
 *     held (refs > 0) ──free──▶ free queue ──allocate──▶ held, hash evicted
 *            ▲                      │
 *            └────────touch─────────┘   a hit on a free block takes it back with its content
 *
 * Invariant: a block is in the free queue exactly when its reference count is 0; block 0, the null block, is never
 * free, never hashed, and its count means nothing. A block that carries a hash is in the index of its group, and only
 * there. A block that is shared only in part carries the hash of an interior boundary, and gives it up for the hash of the
 * whole when it fills up. Freed blocks without a hash go to the front (they hold nothing worth keeping), those with one to the back.
 * After vLLM's BlockPool.
 */
import { invariant } from '@kvtier/errors';
import type { BlockPolicyName } from '@kvtier/eviction';
import type { HashKey } from '@kvtier/identity';
import type { EventLog, KvCacheEvent } from './events.ts';
import { FreeQueue } from './free-queue.ts';
import { type FullBlocks, runOf } from './full-blocks.ts';
import { HashIndex } from './hash-index.ts';
import { type HashQuery, HashRows } from './hash-rows.ts';
import { type GroupKind, heldEvents } from './held-events.ts';
import { type FreeBlocks, PolicyQueue } from './policy-queue.ts';
import type { BlockHashes, CacheRequest } from './request.ts';

export const nullBlock = 0;

/** The first `tokens` tokens of a request end inside this block, at a hash boundary: make them findable. */
export interface PartialBlock {
  readonly request: CacheRequest;
  readonly block: number;
  readonly tokens: number;
  readonly hashTokens: number;
  readonly group: number;
  readonly kind: string;
}

export interface BlockPoolOptions {
  /** Blocks, the null block included. */
  readonly blockCount: number;
  readonly enableCaching: boolean;
  /** Attention groups; each has its own index over the same blocks. */
  readonly groupCount: number;
  readonly events: EventLog;
  /** Which cached block goes first; default: the one freed longest ago, as in vLLM. */
  readonly evictionPolicy?: BlockPolicyName | undefined;
  /** A hit needs equal content besides equal hashes: requests bring `contentDigests`. */
  readonly compareContent?: boolean | undefined;
}

export class BlockPool {
  readonly blockCount: number;
  readonly #enableCaching: boolean;
  readonly #events: EventLog;
  readonly #free: FreeBlocks;
  /** The same, when a policy orders it. */
  readonly #order: PolicyQueue | undefined;
  readonly #refs: Int32Array;
  readonly #rows: HashRows;
  /** Tokens of the chain up to and including the block; valid where there is a hash. */
  readonly #hashTokens: Int32Array;
  readonly #groups: Uint8Array;
  #reservedCount = 0;
  /** Free blocks that somebody reads, out of the queue meanwhile; one that is touched leaves this set. */
  readonly #heldInPlace = new Set<number>();
  /** Rows of further hashes of a block, of boundaries inside it. */
  readonly #interior = new Map<number, number[]>();
  readonly #indexes: readonly HashIndex[];

  constructor(options: BlockPoolOptions) {
    const { blockCount } = options;
    invariant(Number.isInteger(blockCount) && blockCount >= 1, () => `block pool: ${blockCount} blocks`);
    this.blockCount = blockCount;
    this.#enableCaching = options.enableCaching;
    this.#events = options.events;
    this.#order = options.evictionPolicy ? new PolicyQueue(blockCount, options.evictionPolicy) : undefined;
    const plain = new FreeQueue(blockCount);
    this.#free = this.#order ?? plain;
    for (let block = 1; block < blockCount; block++) {
      if (this.#order) this.#order.appendUnused(block);
      else plain.append(block);
    }
    this.#refs = new Int32Array(blockCount);
    this.#rows = new HashRows(blockCount, options.compareContent ?? false);
    this.#hashTokens = new Int32Array(blockCount);
    this.#groups = new Uint8Array(blockCount);
    this.#indexes = Array.from({ length: options.groupCount }, () => new HashIndex(this.#rows));
  }

  get freeCount(): number {
    return this.#free.count;
  }

  /** Share of the blocks that are held, 0..1. */
  get usage(): number {
    return this.blockCount === 1 ? 0 : 1 - this.#free.count / (this.blockCount - 1);
  }

  /** Distinct hashes that can be found. */
  get cachedCount(): number {
    return this.#indexes.reduce((sum, index) => sum + index.keyCount, 0);
  }

  refCount(block: number): number {
    return this.#refs[block]!;
  }

  isFree(block: number): boolean {
    return this.#free.has(block);
  }

  /** Tokens of the chain that the block's hash stands for; 0 without one. */
  hashTokensOf(block: number): number {
    return this.#rows.has(block) ? this.#hashTokens[block]! : 0;
  }

  hashOf(block: number): HashKey | undefined {
    return this.#rows.keyOf(block);
  }

  /** Whether a block carries the hash at `index` of a chain. */
  carries(block: number, hashes: BlockHashes, index: number): boolean {
    return this.#rows.has(block) && this.#rows.equals(block, this.#rows.query(hashes, index));
  }

  /**
   * The blocks that hold the hash at `index` of a chain for each of these groups; undefined if any group misses. Not
   * touched: they may be free and be reused by the next allocation.
   */
  findAll(hashes: BlockHashes, index: number, groups: readonly number[]): number[] | undefined {
    const query = this.#rows.query(hashes, index);
    const blocks: number[] = [];
    for (const group of groups) {
      const block = this.#find(query, group);
      if (block === undefined) return undefined;
      blocks.push(block);
    }
    return blocks;
  }

  /**
   * The blocks of a chain from its start on, up to the first that one group misses; at most `count`. Block i has the hash at
   * (i + 1) × hashesPerBlock - 1. One column per group.
   */
  findRun(hashes: BlockHashes, hashesPerBlock: number, count: number, groups: readonly number[]): number[][] {
    if (groups.length === 1) {
      const rows = this.#indexes[groups[0]!]!.findRun(hashes, hashesPerBlock, count);
      for (let i = 0; i < rows.length; i++) rows[i] = this.#rows.blockOf(rows[i]!);
      return [rows];
    }
    const columns: number[][] = groups.map(() => []);
    for (let i = 0; i < count && this.findEach(hashes, (i + 1) * hashesPerBlock - 1, groups, columns); ) i++;
    return columns;
  }

  /** As `findAll`, with the blocks appended to one column per group; false, and nothing appended, on a miss. */
  findEach(hashes: BlockHashes, index: number, groups: readonly number[], columns: readonly number[][]): boolean {
    const query = this.#rows.query(hashes, index);
    for (let g = 0; g < groups.length; g++) {
      const block = this.#find(query, groups[g]!);
      if (block === undefined) {
        for (let done = 0; done < g; done++) columns[done]!.pop();
        return false;
      }
      columns[g]!.push(block);
    }
    return true;
  }

  /** Take `count` blocks from the front of the free queue, evicting what they cached. At most `freeCount`. */
  allocate(count: number): number[] {
    invariant(count <= this.#free.count, () => `block pool: ${count} blocks wanted, ${this.#free.count} free`);
    const blocks = this.#free.takeFront(count);
    this.#evict(blocks);
    for (let i = 0; i < count; i++) this.#refs[blocks[i]!] = 1;
    return blocks;
  }

  /** Take blocks for the life of the pool: a reset does not wait for them. */
  reserve(count: number): number[] {
    this.#reservedCount += count;
    return this.allocate(count);
  }

  /** Hold blocks once more; a free one is taken out of the queue with its content. */
  touch(blocks: Iterable<number>): void {
    for (const block of blocks) {
      if (this.#refs[block] === 0 && block !== nullBlock) this.#free.remove(block);
      this.#refs[block]!++;
      if (this.#heldInPlace.size > 0) this.#heldInPlace.delete(block);
    }
  }

  /** Hold blocks of one chain for a reader: what was free comes back to its place in the order of eviction. */
  holdInPlace(blocks: readonly number[]): () => void {
    const free = blocks.filter((block) => this.#free.has(block));
    this.touch(blocks);
    for (const block of free) this.#heldInPlace.add(block);
    return () => {
      const back = blocks.filter((block) => this.#heldInPlace.delete(block) && this.#rows.has(block));
      for (const block of back) this.#refs[block] = 0;
      this.#free.restore(back);
      this.release(blocks.filter((block) => this.#refs[block]! > 0).reverse());
    };
  }

  /** Cached blocks among the next `count` that are reused, soonest first. */
  nextEvicted(count: number): number[] {
    return this.#free.first(count).filter((block) => this.#rows.has(block));
  }

  /** As `touch`, for the blocks of a hit in chain order: a policy learns that they are of use. */
  touchHit(blocks: readonly number[]): void {
    this.touch(blocks);
    if (this.#order) for (let i = blocks.length - 1; i >= 0; i--) this.#order.used(blocks[i]!);
  }

  /** The block that holds the hash at `index` of a chain, other than `block`. */
  findOther(hashes: BlockHashes, index: number, group: number, block: number): number | undefined {
    const found = this.#find(this.#rows.query(hashes, index), group);
    return found === block ? undefined : found;
  }

  /**
   * Let blocks go. Those that nobody holds any more become free in the order given: with a hash behind all others,
   * without one before all others (the first given is reused next).
   */
  release(blocks: readonly number[]): void {
    let unhashed = 0;
    for (const block of blocks) {
      const refs = --this.#refs[block]!;
      if (block === nullBlock) continue;
      invariant(refs >= 0, () => `block pool: block ${block} is released more often than held`);
      if (refs > 0) continue;
      if (this.#enableCaching && this.#rows.has(block)) this.#free.append(block);
      else unhashed++;
    }
    // Backwards, because each prepend goes before the last one.
    for (let i = blocks.length - 1; unhashed > 0; i--) {
      const block = blocks[i]!;
      if (block === nullBlock || this.#refs[block] !== 0 || this.#free.has(block)) continue;
      this.#free.prepend(block);
      unhashed--;
    }
  }

  /** Register full blocks under their hashes; null and unwanted ones are skipped. One BlockStored for the whole range. */
  cacheFullBlocks(full: FullBlocks): void {
    const { request, table, first, end, blockTokens, group } = full;
    if (first >= end) return;
    const { hashes } = request;
    const hashesPerBlock = blockTokens / full.hashTokens;
    invariant(end * hashesPerBlock <= hashes.blockCount, () => `block pool: ${end} full blocks past the last hash`);
    const places: number[] = [];
    const blocks: number[] = [];
    for (let i = first; i < end; i++) {
      const block = table[i]!;
      if (block === nullBlock || (full.keep && !full.keep(i))) continue;
      this.#promote(block, (i + 1) * blockTokens);
      places.push(i);
      blocks.push(block);
    }
    this.#rows.setEach(blocks, hashes, places, hashesPerBlock);
    for (let n = 0; n < blocks.length; n++) {
      this.#hashTokens[blocks[n]!] = (places[n]! + 1) * blockTokens;
      this.#groups[blocks[n]!] = group;
    }
    this.#indexes[group]!.add(blocks);
    if (this.#order) this.#tellOrder(this.#order, table, places);
    if (this.#events.enabled) this.#events.addStored(runOf(full, places));
  }

  /** The blocks first..end-1 of a table were hits: tell those who follow this request alone. No state changes. */
  reportCached(full: FullBlocks): void {
    if (!this.#events.enabled || full.first >= full.end) return;
    const places: number[] = [];
    for (let i = full.first; i < full.end; i++) if (full.table[i] !== nullBlock) places.push(i);
    this.#events.addReused(runOf(full, places));
  }

  /** Register a block under a boundary inside it, beside the hash of the whole; a shorter boundary is given up. */
  cachePartialBlock(partial: PartialBlock): void {
    const { request, block, tokens, hashTokens, group } = partial;
    if (block === nullBlock) return;
    const index = tokens / hashTokens - 1;
    const query = this.#rows.query(request.hashes, index);
    const interior = this.#interior.get(block) ?? [];
    if (this.carries(block, request.hashes, index) || interior.some((row) => this.#rows.equals(row, query))) return;
    if (this.hashTokensOf(block) > tokens) {
      const row = this.#rows.addExtra(block, query);
      this.#interior.set(block, [...interior, row]);
      this.#indexes[group]!.add([row]);
    } else {
      this.#evict([block]);
      this.#rows.set(block, this.#rows.query(request.hashes, index));
      this.#index(block, tokens, group);
    }
    if (!this.#events.enabled) return;
    const { description } = request;
    this.#events.add({
      type: 'BlockStored',
      blockHashes: [request.hashes.keyAt(index)],
      parentBlockHash: index === 0 ? null : request.hashes.keyAt(index - 1),
      tokenIds: Array.from(description?.tokenIds(tokens - hashTokens, tokens) ?? []),
      blockSize: hashTokens,
      loraId: description?.loraId ?? null,
      loraName: description?.loraName ?? null,
      medium: 'GPU',
      extraKeys: [description?.extraKeys(tokens - hashTokens, tokens) ?? null],
      groupIdx: group,
      kvCacheSpecKind: partial.kind,
      kvCacheSpecSlidingWindow: null,
    });
  }

  /** What `source` caches is cached in `target` from now on: its content is being copied there. */
  moveHashes(source: number, target: number): void {
    if (!this.#rows.has(source)) return; // evicted meanwhile
    invariant(!this.#rows.has(target), () => `block pool: block ${target} carries a hash already`);
    const group = this.#groups[source]!;
    this.#indexes[group]!.remove([source]);
    this.#rows.move(source, target);
    this.#order?.forget(source);
    this.#index(target, this.#hashTokens[source]!, group);
    const interior = this.#interior.get(source);
    if (!interior) return;
    this.#interior.delete(source);
    this.#interior.set(target, interior);
    // Inserted anew: of several blocks with one hash, the others have come before.
    this.#indexes[group]!.remove(interior);
    for (const row of interior) this.#rows.setOwner(row, target);
    this.#indexes[group]!.add(interior);
  }

  /** Forget what these blocks cache. They may be held; their holders keep them. */
  evict(blocks: Iterable<number>): void {
    const distinct = [...new Set(blocks)];
    for (const block of distinct)
      invariant(block >= 0 && block < this.blockCount, () => `block pool: there is no block ${block}`);
    this.#evict(distinct);
  }

  /** Forget those of these blocks that carry a hash of this chain. */
  evictOf(hashes: BlockHashes, blocks: Iterable<number>): void {
    const chain = new Set(Array.from({ length: hashes.blockCount }, (_, index) => hashes.keyAt(index)));
    this.evict([...blocks].filter((block) => this.#rows.has(block) && chain.has(this.#rows.keyOf(block)!)));
  }

  /** Forget everything that is cached; refused while any block is held. */
  reset(): boolean {
    if (this.#free.count !== this.blockCount - 1 - this.#reservedCount) return false;
    for (const index of this.#indexes) index.clear();
    this.#rows.clearAll();
    this.#interior.clear();
    this.#events.add({ type: 'AllBlocksCleared' });
    return true;
  }

  /** All that can be found now, once for each block: a copy made at once, listed as it is asked for. `kinds`: of the groups. */
  heldEvents(kinds: readonly GroupKind[]): Iterable<readonly KvCacheEvent[]> {
    const keyOf = this.#rows.copyOfKeys();
    return heldEvents(
      this.#indexes.map((index, group) => {
        const { kind, windowTokens } = kinds[group]!;
        return { group, kind, windowTokens, rows: [...index.rows()], keyOf };
      }),
    );
  }

  /** The whole pool, for tests: free queue in order, counts of held blocks, hashed blocks, and every key of each. */
  snapshot(): {
    free: number[];
    refs: Map<number, number>;
    hashed: { block: number; hash: HashKey; group: number; tokens: number }[];
    keys: { block: number; hash: HashKey; group: number }[];
  } {
    const refs = new Map<number, number>();
    const hashed: { block: number; hash: HashKey; group: number; tokens: number }[] = [];
    for (let block = 1; block < this.blockCount; block++) {
      if (this.#refs[block] !== 0) refs.set(block, this.#refs[block]!);
      const hash = this.#rows.keyOf(block);
      if (hash !== undefined)
        hashed.push({ block, hash, group: this.#groups[block]!, tokens: this.#hashTokens[block]! });
    }
    const keys = this.#indexes.flatMap((index, group) =>
      [...index.rows()].map((row) => ({ block: this.#rows.blockOf(row), hash: this.#rows.keyOf(row)!, group })),
    );
    return { free: this.#free.toArray(), refs, hashed, keys };
  }

  /** O(blocks). Throws InvariantError at the first thing that does not hold. */
  checkIntegrity(): void {
    this.#free.checkIntegrity();
    invariant(!this.#free.has(nullBlock), 'block pool: the null block is free');
    invariant(!this.#rows.has(nullBlock), 'block pool: the null block carries a hash');
    let hashedCount = 0;
    for (let block = 1; block < this.blockCount; block++) {
      const refs = this.#refs[block]!;
      invariant(this.#free.has(block) === (refs === 0), () => `block pool: block ${block} has ${refs} references`);
      if (this.#rows.has(block)) hashedCount += 1 + (this.#interior.get(block)?.length ?? 0);
    }
    let indexedCount = 0;
    this.#indexes.forEach((index, group) => {
      index.checkIntegrity();
      for (const row of index.rows()) {
        const block = this.#rows.blockOf(row);
        const agrees = (row === block || this.#interior.get(block)?.includes(row)) && this.#groups[block] === group;
        invariant(agrees, () => `block pool: block ${block} is indexed under a hash it does not carry`);
        indexedCount++;
      }
    });
    invariant(hashedCount === indexedCount, () => `block pool: ${hashedCount} hashed, ${indexedCount} indexed`);
  }

  #find(query: HashQuery, group: number): number | undefined {
    const row = this.#indexes[group]!.find(query);
    return row === undefined ? undefined : this.#rows.blockOf(row);
  }

  /** Make a block findable under the hash that its row has. */
  #index(block: number, tokens: number, group: number): void {
    this.#hashTokens[block] = tokens;
    this.#groups[block] = group;
    this.#indexes[group]!.add([block]);
    this.#order?.named(block, undefined, tokens, this.#rows.nameOf(block));
  }

  #tellOrder(order: PolicyQueue, table: readonly number[], places: readonly number[]): void {
    for (const i of places) {
      const block = table[i]!;
      const parent = i === 0 || table[i - 1] === nullBlock ? undefined : table[i - 1];
      order.named(block, parent, this.#hashTokens[block]!, this.#rows.nameOf(block));
    }
  }

  /** A block may only change its hash for one that covers more of it. */
  #promote(block: number, tokens: number): void {
    if (!this.#rows.has(block)) return;
    const covers = this.#hashTokens[block]!;
    invariant(covers < tokens, () => `block pool: block ${block} carries the hash of ${covers} tokens already`);
    this.#evict([block]);
  }

  /** Distinct blocks lose their hashes, where they have any. */
  #evict(blocks: readonly number[]): void {
    const hashed: number[][] = this.#indexes.map(() => []);
    for (let i = 0; i < blocks.length; i++) {
      const block = blocks[i]!;
      if (this.#rows.has(block)) hashed[this.#groups[block]!]!.push(block);
    }
    for (let group = 0; group < hashed.length; group++) this.#indexes[group]!.remove(hashed[group]!);
    if (this.#order || this.#interior.size > 0) for (const block of blocks) this.#forget(block);
    else {
      if (this.#events.enabled)
        for (const block of blocks) this.#rows.tellRemoved(this.#events, block, this.#groups[block]!);
      this.#rows.clear(blocks);
    }
  }

  /** The index no longer has the block's own hash: what else there is of it. */
  #forget(block: number): void {
    if (!this.#rows.has(block)) return;
    const group = this.#groups[block]!;
    this.#tellRemoved(block, group);
    this.#rows.clear([block]);
    if (this.#order && !this.#free.has(block)) this.#order.forget(block);
    const interior = this.#interior.get(block);
    if (interior === undefined) return;
    this.#indexes[group]!.remove(interior);
    for (const row of interior) {
      this.#tellRemoved(row, group);
      this.#rows.removeExtra(row);
    }
    this.#interior.delete(block);
  }

  #tellRemoved(row: number, group: number): void {
    if (this.#events.enabled) this.#rows.tellRemoved(this.#events, row, group);
  }
}
