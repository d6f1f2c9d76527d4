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
 * there. Freed blocks without a hash go to the front (they hold nothing worth keeping), those with one to the back.
 * After vLLM's BlockPool.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';
import type { EventLog } from './events.ts';
import { FreeQueue } from './free-queue.ts';
import { HashIndex } from './hash-index.ts';
import type { CacheRequest } from './request.ts';

export const nullBlock = 0;

/** Logical blocks `first`..`end`-1 of a request are now full: make them findable. */
export interface FullBlocks {
  readonly request: CacheRequest;
  /** The request's block table. */
  readonly table: readonly number[];
  readonly first: number;
  readonly end: number;
  readonly blockTokens: number;
  readonly group: number;
  /** For the event: "full_attention" and the like. */
  readonly kind: string;
}

export interface BlockPoolOptions {
  /** Blocks, the null block included. */
  readonly blockCount: number;
  readonly enableCaching: boolean;
  /** Attention groups; each has its own index over the same blocks. */
  readonly groupCount: number;
  readonly events: EventLog;
}

export class BlockPool {
  readonly blockCount: number;
  readonly #enableCaching: boolean;
  readonly #events: EventLog;
  readonly #free: FreeQueue;
  readonly #refs: Int32Array;
  readonly #hashes: (HashKey | undefined)[];
  /** Tokens of the chain up to and including the block; valid where there is a hash. */
  readonly #hashTokens: Int32Array;
  readonly #groups: Uint8Array;
  readonly #indexes: readonly HashIndex[];

  constructor(options: BlockPoolOptions) {
    const { blockCount } = options;
    invariant(Number.isInteger(blockCount) && blockCount >= 1, () => `block pool: ${blockCount} blocks`);
    this.blockCount = blockCount;
    this.#enableCaching = options.enableCaching;
    this.#events = options.events;
    this.#free = new FreeQueue(blockCount);
    for (let block = 1; block < blockCount; block++) this.#free.append(block);
    this.#refs = new Int32Array(blockCount);
    this.#hashes = new Array<HashKey | undefined>(blockCount).fill(undefined);
    this.#hashTokens = new Int32Array(blockCount);
    this.#groups = new Uint8Array(blockCount);
    this.#indexes = Array.from({ length: options.groupCount }, () => new HashIndex());
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

  hashOf(block: number): HashKey | undefined {
    return this.#hashes[block];
  }

  /** The block that holds this hash for a group. Not touched: it may be free and be reused by the next allocation. */
  find(hash: HashKey, group: number): number | undefined {
    return this.#indexes[group]!.get(hash);
  }

  /** Take `count` blocks from the front of the free queue, evicting what they cached. At most `freeCount`. */
  allocate(count: number): number[] {
    invariant(count <= this.#free.count, () => `block pool: ${count} blocks wanted, ${this.#free.count} free`);
    const blocks = new Array<number>(count);
    for (let i = 0; i < count; i++) {
      const block = this.#free.popFront();
      this.#evict(block);
      this.#refs[block] = 1;
      blocks[i] = block;
    }
    return blocks;
  }

  /** Hold blocks once more; a free one is taken out of the queue with its content. */
  touch(blocks: Iterable<number>): void {
    for (const block of blocks) {
      if (this.#refs[block] === 0 && block !== nullBlock) this.#free.remove(block);
      this.#refs[block]!++;
    }
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
      if (this.#enableCaching && this.#hashes[block] !== undefined) this.#free.append(block);
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

  /** Register full blocks under their hashes; null blocks are skipped. One BlockStored for the whole range. */
  cacheFullBlocks(full: FullBlocks): void {
    const { request, table, first, end, blockTokens, group } = full;
    if (first >= end) return;
    const { hashes } = request;
    invariant(end <= hashes.blockCount, () => `block pool: ${end} full blocks, ${hashes.blockCount} hashes`);
    const index = this.#indexes[group]!;
    const stored: HashKey[] = [];
    const extraKeys: (readonly unknown[] | null)[] = [];
    for (let i = first; i < end; i++) {
      const block = table[i]!;
      if (block === nullBlock) continue;
      invariant(this.#hashes[block] === undefined, () => `block pool: block ${block} carries a hash already`);
      const hash = hashes.keyAt(i);
      this.#hashes[block] = hash;
      this.#hashTokens[block] = (i + 1) * blockTokens;
      this.#groups[block] = group;
      index.add(hash, block);
      if (this.#events.enabled) {
        stored.push(hash);
        extraKeys.push(request.description?.extraKeys(i) ?? null);
      }
    }
    if (!this.#events.enabled) return;
    this.#events.add({
      type: 'BlockStored',
      blockHashes: stored,
      parentBlockHash: first === 0 ? null : hashes.keyAt(first - 1),
      tokenIds: request.description?.tokenIds(first * blockTokens, end * blockTokens) ?? [],
      blockSize: blockTokens,
      loraId: request.description?.loraId ?? null,
      loraName: request.description?.loraName ?? null,
      medium: 'GPU',
      extraKeys,
      groupIdx: group,
      kvCacheSpecKind: full.kind,
      kvCacheSpecSlidingWindow: null,
    });
  }

  /** Forget what these blocks cache. They may be held; their holders keep them. */
  evict(blocks: Iterable<number>): void {
    for (const block of blocks) {
      invariant(block >= 0 && block < this.blockCount, () => `block pool: there is no block ${block}`);
      this.#evict(block);
    }
  }

  /** Forget everything that is cached; refused while any block is held. */
  reset(): boolean {
    if (this.#free.count !== this.blockCount - 1) return false;
    for (const index of this.#indexes) index.clear();
    this.#hashes.fill(undefined);
    this.#events.add({ type: 'AllBlocksCleared' });
    return true;
  }

  /** The whole pool, for tests: free queue in order, counts of held blocks, [block, hash, group, tokens]. */
  snapshot(): {
    free: number[];
    refs: Map<number, number>;
    hashed: { block: number; hash: HashKey; group: number; tokens: number }[];
  } {
    const refs = new Map<number, number>();
    const hashed: { block: number; hash: HashKey; group: number; tokens: number }[] = [];
    for (let block = 1; block < this.blockCount; block++) {
      if (this.#refs[block] !== 0) refs.set(block, this.#refs[block]!);
      const hash = this.#hashes[block];
      if (hash !== undefined)
        hashed.push({ block, hash, group: this.#groups[block]!, tokens: this.#hashTokens[block]! });
    }
    return { free: this.#free.toArray(), refs, hashed };
  }

  /** O(blocks). Throws InvariantError at the first thing that does not hold. */
  checkIntegrity(): void {
    this.#free.checkIntegrity();
    invariant(!this.#free.has(nullBlock), 'block pool: the null block is free');
    invariant(this.#hashes[nullBlock] === undefined, 'block pool: the null block carries a hash');
    let hashedCount = 0;
    for (let block = 1; block < this.blockCount; block++) {
      const refs = this.#refs[block]!;
      invariant(this.#free.has(block) === (refs === 0), () => `block pool: block ${block} has ${refs} references`);
      if (this.#hashes[block] !== undefined) hashedCount++;
    }
    let indexedCount = 0;
    this.#indexes.forEach((index, group) => {
      for (const [hash, block] of index.entries()) {
        const agrees = this.#hashes[block] === hash && this.#groups[block] === group;
        invariant(agrees, () => `block pool: block ${block} is indexed under a hash it does not carry`);
        indexedCount++;
      }
    });
    invariant(hashedCount === indexedCount, () => `block pool: ${hashedCount} hashed, ${indexedCount} indexed`);
  }

  #evict(block: number): void {
    const hash = this.#hashes[block];
    if (hash === undefined) return;
    const group = this.#groups[block]!;
    this.#indexes[group]!.remove(hash, block);
    this.#hashes[block] = undefined;
    this.#events.add({ type: 'BlockRemoved', blockHashes: [hash], medium: 'GPU', groupIdx: group });
  }
}
