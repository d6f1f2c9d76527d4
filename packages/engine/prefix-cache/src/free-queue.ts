/**
 * The free blocks of a pool in eviction order: the front is reused next.
 *
 *     sentinel ⇄ front ⇄ … ⇄ back ⇄ sentinel        next[], prev[]: two Int32Arrays, one entry per block + sentinel
 *
 * Every operation on one block is O(1), `remove` from the middle included, which is what makes a hit on a free block
 * cheap. Invariant: a block is linked exactly when `has(block)`; `count` is the number of linked blocks; stamps ascend.
 * After vLLM's FreeKVCacheBlockQueue, with the links of lru-cache (parallel typed arrays instead of node objects).
 */
import { invariant } from '@kvtier/errors';

const unlinked = -1;

export class FreeQueue {
  readonly #next: Int32Array;
  readonly #prev: Int32Array;
  readonly #sentinel: number;
  #count = 0;
  /** When a block was appended; 0: it was prepended. Ascending along the queue. */
  readonly #stamps: Float64Array;
  #appended = 0;

  /** Room for blocks 0..blockCount-1; empty at first. */
  constructor(blockCount: number) {
    this.#sentinel = blockCount;
    this.#next = new Int32Array(blockCount + 1).fill(unlinked);
    this.#prev = new Int32Array(blockCount + 1).fill(unlinked);
    this.#stamps = new Float64Array(blockCount);
    this.#next[blockCount] = blockCount;
    this.#prev[blockCount] = blockCount;
  }

  get count(): number {
    return this.#count;
  }

  has(block: number): boolean {
    return this.#next[block] !== unlinked;
  }

  /** Take the `count` blocks that are reused next, in this order. At most `this.count`. */
  takeFront(count: number): number[] {
    invariant(count <= this.#count, () => `free queue: ${count} of ${this.#count} blocks wanted; callers check count`);
    const next = this.#next;
    const prev = this.#prev;
    const blocks = new Array<number>(count);
    let front = next[this.#sentinel]!;
    for (let i = 0; i < count; i++) {
      blocks[i] = front;
      const after = next[front]!;
      next[front] = unlinked;
      prev[front] = unlinked;
      front = after;
    }
    next[this.#sentinel] = front;
    prev[front] = this.#sentinel;
    this.#count -= count;
    return blocks;
  }

  append(block: number): void {
    this.#link(block, this.#prev[this.#sentinel]!, this.#sentinel);
    this.#stamps[block] = ++this.#appended;
  }

  prepend(block: number): void {
    this.#link(block, this.#sentinel, this.#next[this.#sentinel]!);
    this.#stamps[block] = 0; // before all that were appended
  }

  remove(block: number): void {
    const next = this.#next[block]!;
    const prev = this.#prev[block]!;
    invariant(next !== unlinked, () => `free queue: block ${block} is not in it`);
    this.#next[prev] = next;
    this.#prev[next] = prev;
    this.#next[block] = unlinked;
    this.#prev[block] = unlinked;
    this.#count--;
  }

  /** The first `count` of `toArray`. */
  first(count: number): number[] {
    const blocks: number[] = [];
    let at = this.#next[this.#sentinel]!;
    for (; at !== this.#sentinel && blocks.length < count; at = this.#next[at]!) blocks.push(at);
    return blocks;
  }

  /**
   * Each back to its place among those that were appended before and after it. Its place is looked for from the back or from the one that
   * came back before it, whichever is nearer: blocks of one chain are neighbours.
   */
  restore(blocks: readonly number[]): void {
    const stamps = this.#stamps;
    const sentinel = this.#sentinel;
    let restored = sentinel;
    for (const block of [...blocks].sort((a, b) => stamps[a]! - stamps[b]!)) {
      const stamp = stamps[block]!;
      if (stamp === 0) restored = sentinel; // prepended anew: at the front
      let next = this.#next[restored]!;
      const nearer = restored === sentinel ? next : restored;
      if (next === sentinel || stamp - stamps[nearer]! <= stamps[this.#prev[sentinel]!]! - stamp) {
        while (next !== sentinel && stamps[next]! < stamp) next = this.#next[next]!;
      } else {
        let prev = this.#prev[sentinel]!;
        while (prev !== sentinel && stamps[prev]! > stamp) prev = this.#prev[prev]!;
        next = this.#next[prev]!;
      }
      this.#link(block, this.#prev[next]!, next);
      restored = block;
    }
  }

  /** All free blocks, next to be reused first. For tests and statistics. */
  toArray(): number[] {
    const blocks: number[] = [];
    for (let at = this.#next[this.#sentinel]!; at !== this.#sentinel; at = this.#next[at]!) {
      blocks.push(at);
      invariant(blocks.length <= this.#count, 'free queue: more links than blocks');
    }
    return blocks;
  }

  checkIntegrity(): void {
    let at = this.#sentinel;
    let seen = -1;
    do {
      const next = this.#next[at]!;
      invariant(next >= 0 && this.#prev[next] === at, () => `free queue: links around block ${at} do not agree`);
      const ascend = at === this.#sentinel || next === this.#sentinel || this.#stamps[at]! <= this.#stamps[next]!;
      invariant(ascend, () => `free queue: block ${next} was appended before block ${at} and stands behind it`);
      at = next;
      seen++;
      invariant(seen <= this.#count, 'free queue: more links than blocks');
    } while (at !== this.#sentinel);
    invariant(seen === this.#count, () => `free queue: ${seen} blocks linked, ${this.#count} counted`);
  }

  #link(block: number, prev: number, next: number): void {
    invariant(this.#next[block] === unlinked && block !== this.#sentinel, () => `free queue: block ${block} is in it`);
    this.#next[prev] = block;
    this.#prev[block] = prev;
    this.#next[block] = next;
    this.#prev[next] = block;
    this.#count++;
  }
}
