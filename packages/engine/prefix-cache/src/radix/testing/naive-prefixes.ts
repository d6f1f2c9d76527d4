/**
 * The oracle of both prefix caches: a plain map of every cached prefix, page by page, searched from one end to the other.
 * `add`, `remove` and `longest` say what a lookup must find, whatever the structure. The rest is the radix tree's rules
 * without a tree: a prefix knows whether a node would end with it, and eviction looks at all of them.
 */
import type { RadixPolicy } from '../eviction-queue.ts';

interface Prefix {
  readonly key: string;
  readonly parent: string;
  readonly page: number;
  /** A node ends here. */
  end: boolean;
  locks: number;
  created: number;
  lastAccess: number;
  hits: number;
  priority: number;
}

const ranks: Record<RadixPolicy, (prefix: Prefix) => number> = {
  lru: (prefix) => prefix.lastAccess,
  lfu: (prefix) => prefix.hits,
  fifo: (prefix) => prefix.created,
  mru: (prefix) => -prefix.lastAccess,
  filo: (prefix) => -prefix.created,
  priority: (prefix) => prefix.priority,
};

export class NaivePrefixes {
  readonly #pageTokens: number;
  readonly #policy: RadixPolicy;
  readonly #trimLeaves: boolean;
  readonly #prefixes = new Map<string, Prefix>();
  /** Copies of a prefix, for structures that may have several. */
  readonly #copies = new Map<string, number>();
  #clock = 0;

  constructor(pageTokens: number, policy: RadixPolicy = 'lru', trimLeaves = false) {
    this.#pageTokens = pageTokens;
    this.#policy = policy;
    this.#trimLeaves = trimLeaves;
  }

  /** The name of the first `pages` pages of a sequence. */
  keyOf(tokens: ArrayLike<number>, pages: number, extraKey = ''): string {
    return `${extraKey}:${Array.from(tokens)
      .slice(0, pages * this.#pageTokens)
      .join(' ')}`;
  }

  add(key: string): void {
    this.#copies.set(key, (this.#copies.get(key) ?? 0) + 1);
  }

  remove(key: string): void {
    const copies = this.#copies.get(key) ?? 0;
    if (copies === 0) throw new Error(`${key}: removed and not there`);
    if (copies === 1) this.#copies.delete(key);
    else this.#copies.set(key, copies - 1);
  }

  clear(): void {
    this.#copies.clear();
  }

  /** Pages of the longest prefix that is there without a gap. */
  longest(tokens: ArrayLike<number>, extraKey = ''): number {
    const wanted = Math.floor(tokens.length / this.#pageTokens);
    let pages = 0;
    while (pages < wanted && this.#copies.has(this.keyOf(tokens, pages + 1, extraKey))) pages++;
    return pages;
  }

  /** As the tree's: the physical pages of the match. */
  match(tokens: ArrayLike<number>, extraKey: string): number[] {
    const now = ++this.#clock;
    const path = this.#path(tokens, this.longest(tokens, extraKey), extraKey);
    for (const prefix of path) prefix.lastAccess = now;
    const last = path.at(-1);
    if (last) last.end = true;
    return path.map(({ page }) => page);
  }

  /**
   * As the tree's; returns duplicatePages. `from`: pages that the caller has locked already, `grows`: and it alone, so
   * that the node becomes longer.
   */
  insert(tokens: ArrayLike<number>, pages: readonly number[], extraKey: string, priority: number, from = 0): number {
    const now = ++this.#clock;
    const there = this.longest(tokens, extraKey);
    const path = this.#path(tokens, there, extraKey);
    for (const prefix of path.slice(from)) {
      prefix.lastAccess = now;
      prefix.hits++;
      prefix.priority = Math.max(prefix.priority, priority);
    }
    const last = path.at(-1);
    const wanted = Math.floor(tokens.length / this.#pageTokens);
    const grows = from > 0 && there === from && last!.locks === 1 && this.#isLeaf(last!) && wanted > from;
    const node = { created: now, hits: 1, priority };
    if (grows) {
      Object.assign(node, { created: last!.created, hits: last!.hits, priority: last!.priority });
      const begin = path.findLastIndex(({ end }, i) => end && i < path.length - 1) + 1;
      for (const prefix of path.slice(begin)) prefix.lastAccess = now;
    }
    if (last) last.end = !grows;
    for (let i = there; i < wanted; i++) {
      const key = this.keyOf(tokens, i + 1, extraKey);
      const parent = this.keyOf(tokens, i, extraKey);
      const page = pages[i - from]!;
      this.#prefixes.set(key, { key, parent, page, end: i === wanted - 1, locks: 0, lastAccess: now, ...node });
      this.add(key);
    }
    if (grows) this.lock(tokens, wanted, extraKey, from);
    return there - from;
  }

  /** Lock (or, by -1, unlock) the first `pages` pages, without the first `from` of them. */
  lock(tokens: ArrayLike<number>, pages: number, extraKey: string, from = 0, by: 1 | -1 = 1): void {
    for (const prefix of this.#path(tokens, pages, extraKey).slice(from)) prefix.locks += by;
  }

  /** As the tree's: the pages of each node that goes. */
  evict(count: number): number[][] {
    const gone: number[][] = [];
    const rank = ranks[this.#policy];
    for (let left = count; left > 0; left -= gone.at(-1)!.length) {
      const leaves = [...this.#prefixes.values()].filter((prefix) => prefix.locks === 0 && this.#isLeaf(prefix));
      leaves.sort((a, b) => rank(a) - rank(b) || a.lastAccess - b.lastAccess);
      let victim = leaves[0];
      if (!victim) break;
      const pages: number[] = [];
      do {
        pages.unshift(victim.page);
        this.#prefixes.delete(victim.key);
        this.remove(victim.key);
        victim = this.#prefixes.get(victim.parent);
      } while (victim && !victim.end && (!this.#trimLeaves || pages.length < left));
      if (victim && this.#isLeaf(victim)) victim.end = true;
      gone.push(pages);
    }
    return gone;
  }

  get counts(): { evictable: number; locked: number } {
    const locked = [...this.#prefixes.values()].filter(({ locks }) => locks > 0).length;
    return { evictable: this.#prefixes.size - locked, locked };
  }

  #isLeaf(prefix: Prefix): boolean {
    return ![...this.#prefixes.values()].some(({ parent }) => parent === prefix.key);
  }

  #path(tokens: ArrayLike<number>, pages: number, extraKey: string): Prefix[] {
    return Array.from({ length: pages }, (_, i) => this.#prefixes.get(this.keyOf(tokens, i + 1, extraKey))!);
  }
}
