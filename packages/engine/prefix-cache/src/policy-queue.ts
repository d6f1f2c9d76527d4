/**
 * The free blocks of a pool in the order of an eviction policy, in place of the plain queue. Blocks that hold nothing worth
 * keeping still go first, the last one freed before all others; what is cached goes as the policy says.
 *
 *     front (no hash)  ■ ■ ■   then   the policy's victim among those that are free
 *
 * The policy tracks a block from the time it gets its hash until it is reused, so that it remembers uses while the block is
 * held; it passes over held ones. A use is a hit; for LRU the end of a use counts, too, as that is the plain queue's order.
 *
 * What comes first (`first`) is asked for at every step, and is found by a walk along the policy's order, held blocks included: so it is
 * looked for again only when enough has changed, and a long walk goes on with the next call: it finds as much as is reused until the next one
 * has ended. In between it may be wrong about blocks that became free meanwhile: a hint may come late, a step may not.
 *
 * Invariant: a free block is either in the front or tracked by the policy, not both. A tracked block that loses its hash
 * keeps its place while it is free, as in the plain queue.
 */
import { invariant } from '@kvtier/errors';
import type { BlockPolicyName } from '@kvtier/eviction';
import { createPolicy, type EvictionPolicy } from '@kvtier/eviction';
import { FreeQueue } from './free-queue.ts';

/** What a pool needs of its free blocks; FreeQueue is the plain one. */
export interface FreeBlocks {
  readonly count: number;
  has(block: number): boolean;
  takeFront(count: number): number[];
  append(block: number): void;
  prepend(block: number): void;
  remove(block: number): void;
  first(count: number): number[];
  restore(blocks: readonly number[]): void;
  toArray(): number[];
  checkIntegrity(): void;
}

/**
 * Tokens of context at which the attention of one token costs as much as the rest of its layer: about 2 × hidden size for
 * the usual shapes (both read O(context × hidden) and O(hidden²)). Only the ratio between blocks matters.
 */
const attentionTokens = 8192;

/** So many entries of the policy's order one call of `first` looks at, some milliseconds; where that only follows links, more. */
const [mostLooked, mostFollowed] = [4_096, 65_536];
/** Of what is reused during one walk, so much is looked for ahead at most. */
const mostAhead = 16_384;

export class PolicyQueue implements FreeBlocks {
  readonly #front: FreeQueue;
  readonly #policy: EvictionPolicy;
  /** Tracked blocks that are free. */
  readonly #isFree: Uint8Array;
  #freeCount = 0;
  /** Behind the front: what `first` found last, in the policy's order, without what was taken or used since. */
  #soon = new Set<number>();
  #soonWanted = 0;
  /** So many blocks may be taken, used or freed before these are looked for again. */
  #soonPatience = 0;
  /** Looks for them anew, over some calls. */
  #walk: Iterator<number> | undefined;
  /** What it has found so far: what is told until it ends is what was found before. */
  #found = new Set<number>();
  /** They have got another place in the policy's order since it began. */
  #moved = new Set<number>();
  /** Blocks that were reused since it began, and during the last one that ended. */
  #taken = 0;
  #takenPerWalk = 0;
  readonly #looksAt: number;
  readonly #mayEvict = (block: number): boolean => this.#isFree[block] === 1;

  constructor(blockCount: number, name: BlockPolicyName) {
    this.#front = new FreeQueue(blockCount);
    this.#policy = createPolicy(name);
    this.#isFree = new Uint8Array(blockCount);
    this.#looksAt = name === 'lru' || name === 'lfu' ? mostFollowed : mostLooked;
  }

  get count(): number {
    return this.#front.count + this.#freeCount;
  }

  has(block: number): boolean {
    return this.#isFree[block] === 1 || this.#front.has(block);
  }

  takeFront(count: number): number[] {
    invariant(count <= this.count, () => `free blocks: ${count} of ${this.count} wanted; callers check count`);
    const blocks = this.#front.takeFront(Math.min(count, this.#front.count));
    while (blocks.length < count) {
      // In one walk: what is held is passed over once for all of them.
      const victims = this.#policy.evict(count - blocks.length, this.#mayEvict);
      if (victims.length === 0) victims.push(this.#takeAnyFree());
      if (this.#walk) this.#taken += victims.length;
      for (const victim of victims) {
        this.#setFree(victim, false);
        this.#moves(victim);
        // Another than was thought: the order has changed.
        if (this.#soon.delete(victim)) this.#soonPatience--;
        else this.#soonPatience = 0;
        blocks.push(victim);
      }
    }
    return blocks;
  }

  append(block: number): void {
    if (!this.#policy.has(block)) this.#policy.insert(block, 0);
    else if (this.#policy.name === 'lru') this.#policy.touch(block, 0);
    invariant(!this.has(block), () => `free blocks: block ${block} is free already`);
    this.#setFree(block, true);
    this.#moves(block);
    this.#soon.delete(block);
    this.#soonPatience--;
  }

  prepend(block: number): void {
    this.forget(block);
    this.#front.prepend(block);
  }

  /** At the start, before anything is cached: behind all others. */
  appendUnused(block: number): void {
    this.#front.append(block);
  }

  remove(block: number): void {
    if (this.#isFree[block] === 1) this.#setFree(block, false);
    else this.#front.remove(block);
  }

  /**
   * A block has got its hash.
   * @param parent the block before it in its chain; undefined: unknown, or the root
   * @param tokens of the chain up to its end: what comes late in a long context costs more to compute
   * @param name 52 bits of its hash
   */
  named(block: number, parent: number | undefined, tokens: number, name: number): void {
    this.forget(block);
    const known = parent !== undefined && this.#policy.has(parent) ? parent : undefined;
    this.#policy.insert(block, 0, { parent: known, name, cost: 1 + tokens / attentionTokens });
  }

  /** A hit; for chains the last block first. */
  used(block: number): void {
    if (this.#policy.has(block)) this.#policy.touch(block, 0);
    this.#moves(block);
    if (this.#soon.delete(block)) this.#soonPatience--;
  }

  /** A block that is held has lost its hash. A free one keeps its place. */
  forget(block: number): void {
    if (this.#isFree[block] === 0 && this.#policy.has(block)) this.#policy.remove(block);
  }

  first(count: number): number[] {
    const blocks = this.#front.first(count);
    if (blocks.length === count || this.#freeCount === 0) return blocks;
    if (count > this.#soonWanted || this.#soonPatience <= 0) this.#findSoon(count);
    for (const block of this.#soon) {
      if (blocks.length === count) break;
      if (this.#mayEvict(block)) blocks.push(block);
    }
    return blocks;
  }

  /** They have kept their places with the policy. */
  restore(blocks: readonly number[]): void {
    for (const block of blocks) {
      if (!this.#policy.has(block)) this.#policy.insert(block, 0);
      this.#setFree(block, true);
    }
  }

  toArray(): number[] {
    return [...this.#front.toArray(), ...[...this.#policy.coldestFirst()].filter(this.#mayEvict)];
  }

  checkIntegrity(): void {
    this.#front.checkIntegrity();
    this.#policy.checkIntegrity();
    let freeCount = 0;
    for (let block = 0; block < this.#isFree.length; block++) {
      if (this.#isFree[block] === 0) continue;
      freeCount++;
      invariant(this.#policy.has(block), () => `free blocks: block ${block} is free and the policy does not know it`);
      invariant(!this.#front.has(block), () => `free blocks: block ${block} is free twice`);
    }
    invariant(freeCount === this.#freeCount, () => `free blocks: ${freeCount}, ${this.#freeCount} counted`);
  }

  /** More than are wanted: so many are there still when they are looked for again, and when that has ended. */
  #findSoon(wanted: number): void {
    const spare = Math.max(Math.floor(wanted / 2), this.#takenPerWalk);
    const most = Math.min(wanted + spare + this.#takenPerWalk, this.#freeCount);
    this.#walk ??= this.#policy.coldestFirst()[Symbol.iterator]();
    let isOver = this.#found.size >= most;
    for (let looked = 0; looked < this.#looksAt && !isOver; looked++) {
      const { value: block, done } = this.#walk.next();
      if (!done && this.#mayEvict(block) && !this.#moved.has(block)) this.#found.add(block);
      isOver = done || this.#found.size >= most;
    }
    if (!isOver) return;
    this.#soon = this.#found;
    this.#found = new Set();
    this.#moved = new Set();
    this.#walk.return?.();
    this.#walk = undefined;
    this.#takenPerWalk = Math.min(this.#taken, mostAhead);
    this.#taken = 0;
    this.#soonWanted = wanted;
    this.#soonPatience = Math.min(spare, Math.floor(most / 2));
  }

  #moves(block: number): void {
    if (!this.#walk) return;
    this.#found.delete(block);
    this.#moved.add(block);
  }

  #setFree(block: number, isFree: boolean): void {
    this.#isFree[block] = isFree ? 1 : 0;
    this.#freeCount += isFree ? 1 : -1;
  }

  /** The policy may insist on children first where a child is held and its parent is not (behind a window). */
  #takeAnyFree(): number {
    const block = this.#isFree.indexOf(1);
    invariant(block > 0, 'free blocks: counted, not found');
    this.#policy.remove(block);
    return block;
  }
}
