/**
 * Which leaf goes next. A binary heap of the leaves that may be evicted, ordered by policy; the names and orders are
 * SGLang's. A leaf whose key changes is queued again, and what was queued before is recognised by its stamp and skipped.
 *
 * Invariants: each evictable leaf has exactly one valid entry; stale entries are at most as many as valid ones and a
 * constant, because the heap is rebuilt past that.
 */
import { invariant } from '@kvtier/errors';
import type { RadixNode } from './radix-node.ts';

/** First to go: least recently used, least often used, oldest, most recently used, newest, of lowest priority. */
export const radixPolicies = ['lru', 'lfu', 'fifo', 'mru', 'filo', 'priority'] as const;
export type RadixPolicy = (typeof radixPolicies)[number];

/** The smallest goes first, behind what nothing leads to any more; equal ones by the time of their last use. */
const rankOf: Readonly<Record<RadixPolicy, (node: RadixNode) => number>> = {
  lru: (node) => node.lastAccess,
  lfu: (node) => node.hits,
  fifo: (node) => node.created,
  mru: (node) => -node.lastAccess,
  filo: (node) => -node.created,
  priority: (node) => node.priority,
};

interface Entry {
  readonly node: RadixNode;
  readonly stamp: number;
  readonly rank: number;
  readonly lastAccess: number;
}

const before = (a: Entry, b: Entry): boolean => (a.rank === b.rank ? a.lastAccess < b.lastAccess : a.rank < b.rank);
const isValid = ({ node, stamp }: Entry): boolean => node.stamp === stamp;

/** Stale entries that are not worth a rebuild. */
const slack = 256;

export class EvictionQueue {
  readonly #rank: (node: RadixNode) => number;
  #heap: Entry[] = [];
  #validCount = 0;
  /** Stamps are never used twice, in whatever node. 0: not queued. */
  #lastStamp = 0;

  constructor(policy: RadixPolicy) {
    const rank = rankOf[policy];
    this.#rank = (node) => (node.isForgotten ? Number.NEGATIVE_INFINITY : rank(node));
  }

  /** Leaves that may be evicted. */
  get count(): number {
    return this.#validCount;
  }

  /** The leaf may be evicted, or its key has changed. */
  put(node: RadixNode): void {
    if (node.stamp === 0) this.#validCount++;
    node.stamp = ++this.#lastStamp;
    this.#heap.push({ node, stamp: node.stamp, rank: this.#rank(node), lastAccess: node.lastAccess });
    if (this.#heap.length > 2 * this.#validCount + slack) this.#rebuild();
    else this.#up(this.#heap.length - 1);
  }

  /** The node may not be evicted any more; no matter if it was not queued. */
  drop(node: RadixNode): void {
    if (node.stamp === 0) return;
    node.stamp = 0;
    this.#validCount--;
  }

  /** The next leaf to go, out of the queue; undefined when none may. */
  pop(): RadixNode | undefined {
    while (this.#heap.length > 0) {
      const first = this.#heap[0]!;
      const last = this.#heap.pop()!;
      if (this.#heap.length > 0) {
        this.#heap[0] = last;
        this.#down(0);
      }
      if (!isValid(first)) continue;
      this.drop(first.node);
      return first.node;
    }
    return undefined;
  }

  clear(): void {
    for (const entry of this.#heap) if (isValid(entry)) entry.node.stamp = 0;
    this.#heap = [];
    this.#validCount = 0;
  }

  /** O(entries). */
  checkIntegrity(): void {
    let valid = 0;
    this.#heap.forEach((entry, i) => {
      if (i > 0) invariant(!before(entry, this.#heap[(i - 1) >> 1]!), 'eviction queue: an entry before its parent');
      if (!isValid(entry)) return;
      valid++;
      const fresh = entry.rank === this.#rank(entry.node) && entry.lastAccess === entry.node.lastAccess;
      invariant(fresh, 'eviction queue: a leaf was used and not queued again');
    });
    invariant(valid === this.#validCount, () => `eviction queue: ${valid} leaves, counted ${this.#validCount}`);
  }

  #rebuild(): void {
    this.#heap = this.#heap.filter(isValid);
    for (let i = (this.#heap.length >> 1) - 1; i >= 0; i--) this.#down(i);
  }

  #up(start: number): void {
    const heap = this.#heap;
    const entry = heap[start]!;
    let at = start;
    while (at > 0) {
      const above = (at - 1) >> 1;
      if (!before(entry, heap[above]!)) break;
      heap[at] = heap[above]!;
      at = above;
    }
    heap[at] = entry;
  }

  #down(start: number): void {
    const heap = this.#heap;
    const entry = heap[start]!;
    let at = start;
    for (;;) {
      let below = 2 * at + 1;
      if (below >= heap.length) break;
      if (below + 1 < heap.length && before(heap[below + 1]!, heap[below]!)) below++;
      if (!before(heap[below]!, entry)) break;
      heap[at] = heap[below]!;
      at = below;
    }
    heap[at] = entry;
  }
}
