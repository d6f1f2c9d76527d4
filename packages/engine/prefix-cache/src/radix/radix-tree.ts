/**
 * A radix tree over token sequences: what SGLang calls RadixCache, without the requests (radix-cache.ts has those).
 *
 *   root '' ── [1 2 3 4] ──┬── [5 6]           a node: tokens, and one physical page per `pageTokens` of them
 *                          └── [7 8 9] ── [4]
 *   root 'salt' ── [1 2]                       one root per extra key
 *
 * A lookup that ends inside a node splits it there, so that its answer is a node. Who uses a node locks it: the node and
 * all above it stay. What nobody locks goes leaf by leaf in the order of the eviction policy.
 *
 * Invariants: sequences are kept in whole pages; no two children of a node begin with the same page; a page is in at
 * most one node; the lock references of a node are at least the sum of its children's, so what is below an unlocked node
 * is unlocked; evictablePages + protectedPages are all pages in the tree. Every operation is O(tokens looked at).
 */
import { invariant } from '@kvtier/errors';
import { EvictionQueue, type RadixPolicy } from './eviction-queue.ts';
import { type ChildKey, RadixNode } from './radix-node.ts';

export interface RadixTreeOptions {
  /** Tokens per page: 1 shares prefixes to the token. */
  readonly pageTokens: number;
  /** Physical pages are numbered below this. */
  readonly pageLimit: number;
  /** Default 'lru'. */
  readonly policy?: RadixPolicy;
  /** Evict no more of a leaf than is asked for, from its end. Default false: whole nodes, as SGLang. */
  readonly trimLeaves?: boolean;
}

export interface RadixMatch {
  /** Ends where the match ends; undefined: nothing matches. */
  readonly node: RadixNode | undefined;
  readonly pageCount: number;
}

export interface RadixInsert {
  /** Ends where the inserted sequence ends; undefined when that has no whole page. */
  readonly node: RadixNode | undefined;
  /** Leading pages of those given that were there already: the tree keeps its own, the caller keeps these. */
  readonly duplicatePages: number;
}

export interface InsertOptions {
  /** Default ''. */
  readonly extraKey?: string;
  /** Default 0. */
  readonly priority?: number;
  /** The sequence goes on where this node ends. The caller locks it. */
  readonly after?: RadixNode | undefined;
}

/** Before the extra key of what is forgotten and still held: no request has such a one. */
const forgotten = '\0forgotten ';

export class RadixTree {
  readonly pageTokens: number;
  readonly #roots = new Map<string, RadixNode>();
  readonly #queue: EvictionQueue;
  readonly #trimLeaves: boolean;
  /** The node that a page is in. */
  readonly #nodeOf: (RadixNode | undefined)[];
  #clock = 0;
  #forgotten = 0;
  #evictablePages = 0;
  #protectedPages = 0;

  constructor({ pageTokens, pageLimit, policy = 'lru', trimLeaves = false }: RadixTreeOptions) {
    invariant(Number.isInteger(pageTokens) && pageTokens >= 1, () => `radix tree: pages of ${pageTokens} tokens`);
    this.pageTokens = pageTokens;
    this.#queue = new EvictionQueue(policy);
    this.#trimLeaves = trimLeaves;
    this.#nodeOf = new Array<RadixNode | undefined>(pageLimit).fill(undefined);
  }

  /** Pages that nobody locks. */
  get evictablePages(): number {
    return this.#evictablePages;
  }

  get protectedPages(): number {
    return this.#protectedPages;
  }

  get pageCount(): number {
    return this.#evictablePages + this.#protectedPages;
  }

  /** The node that holds this page, if any. */
  nodeOf(page: number): RadixNode | undefined {
    return this.#nodeOf[page];
  }

  /** The longest prefix of `tokens` in the tree, in whole pages. Counts as a use; may split a node. */
  match(tokens: Int32Array, extraKey = ''): RadixMatch {
    const now = ++this.#clock;
    const root = this.#roots.get(extraKey);
    if (!root) return { node: undefined, pageCount: 0 };
    const wanted = Math.floor(tokens.length / this.pageTokens);
    let node = root;
    let at = 0;
    while (at < wanted) {
      const next = this.#step(node, tokens, at, wanted);
      if (!next) break;
      at += next.pageCount;
      node = next;
      this.#use(node, now);
    }
    return { node: node === root ? undefined : node, pageCount: at };
  }

  /** Pages from the root to the end of a node, in order. */
  pathPages(node: RadixNode): number[] {
    const pages = new Array<number>(node.endPages);
    for (let one: RadixNode | undefined = node; one; one = one.parent) {
      const first = one.endPages - one.pageCount;
      for (let i = 0; i < one.pageCount; i++) pages[first + i] = one.pages[i]!;
    }
    return pages;
  }

  /**
   * Put a sequence in, with the pages of its tokens; a tail that is no whole page is left out. New pages belong to the
   * tree from now on. Counts as a use by one more request of the nodes that it passes.
   */
  insert(tokens: Int32Array, pages: ArrayLike<number>, options: InsertOptions = {}): RadixInsert {
    const { after, extraKey = '', priority = 0 } = options;
    const wanted = Math.floor(tokens.length / this.pageTokens);
    invariant(pages.length >= wanted, () => `radix tree: ${pages.length} pages for ${wanted}`);
    if (wanted === 0) return { node: after, duplicatePages: 0 };
    const now = ++this.#clock;
    let node = after ?? this.#rootFor(extraKey);
    let at = 0;
    while (at < wanted) {
      const next = this.#step(node, tokens, at, wanted);
      if (!next) break;
      at += next.pageCount;
      node = next;
      this.#recordHit(node, now, priority);
    }
    const duplicatePages = at;
    if (at < wanted) {
      const tail = tokens.slice(at * this.pageTokens, wanted * this.pageTokens);
      const own = new Int32Array(wanted - at);
      for (let i = 0; i < own.length; i++) {
        own[i] = pages[at + i]!;
        invariant(!this.#nodeOf[own[i]!], () => `radix tree: page ${own[i]} is in it already`);
      }
      const grows = node === after && node.isLeaf && node.lockRefs - node.holdRefs === 1;
      if (grows) this.#grow(node, tail, own, now);
      else node = this.#addLeaf(node, tail, own, now, priority);
    }
    return { node, duplicatePages };
  }

  /** One more request uses all nodes down to this one. */
  recordHit(node: RadixNode, priority = 0): void {
    const now = ++this.#clock;
    for (let one = node; one.parent; one = one.parent) this.#recordHit(one, now, priority);
  }

  /** All nodes down to this one were in use until now. */
  touch(node: RadixNode): void {
    const now = ++this.#clock;
    for (let one = node; one.parent; one = one.parent) this.#use(one, now);
  }

  /** The node and all above it stay until `unlock`. */
  lock(node: RadixNode): void {
    for (let one = node; one.parent; one = one.parent) {
      if (one.lockRefs++ > 0) continue;
      this.#queue.drop(one);
      this.#evictablePages -= one.pageCount;
      this.#protectedPages += one.pageCount;
    }
  }

  unlock(node: RadixNode): void {
    for (let one = node; one.parent; one = one.parent) {
      invariant(one.lockRefs > 0, 'radix tree: a node is unlocked more often than locked');
      if (--one.lockRefs > 0) continue;
      this.#evictablePages += one.pageCount;
      this.#protectedPages -= one.pageCount;
      if (one.isLeaf) this.#queue.put(one);
    }
  }

  /** As lock, for whoever needs the pages of now and does not care if the node grows. */
  hold(node: RadixNode): void {
    this.lock(node);
    node.holdRefs++;
  }

  release(node: RadixNode): void {
    node.holdRefs--;
    this.unlock(node);
  }

  /** Pages that locking this node would take out of what can be evicted. */
  unlockedPages(node: RadixNode): number {
    let pages = 0;
    for (let one = node; one.parent && one.lockRefs === 0; one = one.parent) pages += one.pageCount;
    return pages;
  }

  /**
   * Evict leaves until at least `pageCount` pages are gone or no leaf may go; returns how many. `onEvict` gets the pages
   * of each, in chain order: they are the caller's again.
   */
  evict(pageCount: number, onEvict: (pages: Int32Array) => void): number {
    let gone = 0;
    while (gone < pageCount) {
      const leaf = this.#queue.pop();
      if (!leaf) break;
      const count = this.#trimLeaves ? Math.min(leaf.pageCount, pageCount - gone) : leaf.pageCount;
      const pages = leaf.pages.subarray(leaf.pageCount - count, leaf.pageCount);
      if (count < leaf.pageCount) this.#trim(leaf, count);
      else this.#remove(leaf);
      gone += count;
      for (const page of pages) this.#nodeOf[page] = undefined;
      onEvict(pages);
    }
    return gone;
  }

  /**
   * Nothing that begins as `tokens` do, by their first page, is matched any more. Its pages are the next to be evicted, and who holds some
   * goes on with them, out of reach. Yields them, node by node.
   */
  *forget(tokens: Int32Array, extraKey: string): Iterable<Int32Array> {
    const root = this.#roots.get(extraKey);
    const top = tokens.length < this.pageTokens ? undefined : root?.children.get(this.#childKey(tokens, 0));
    if (!root || !top) return;
    const key = this.#childKey(top.tokens, 0);
    root.children.delete(key);
    if (root.isLeaf) this.#roots.delete(extraKey);
    const apart = this.#rootFor(`${forgotten}${++this.#forgotten}`);
    apart.children.set(key, top);
    top.parent = apart;
    const open = [top];
    for (let node = open.pop(); node; node = open.pop()) {
      node.isForgotten = true;
      if (node.stamp > 0) this.#queue.put(node);
      yield node.pages.subarray(0, node.pageCount);
      for (const child of node.children.values()) open.push(child);
    }
  }

  /** Every sequence that ends in a leaf, for tests and debugging. */
  *leaves(): Generator<{ extraKey: string; node: RadixNode }> {
    for (const [extraKey, root] of this.#roots) {
      const open = [root];
      for (let node = open.pop(); node; node = open.pop()) {
        if (node.isLeaf) yield { extraKey, node };
        open.push(...node.children.values());
      }
    }
  }

  /** Forget everything; refused while anything is locked. */
  reset(): boolean {
    if (this.#protectedPages > 0) return false;
    this.#queue.clear();
    this.#roots.clear();
    this.#nodeOf.fill(undefined);
    this.#evictablePages = 0;
    return true;
  }

  /** O(tokens). Throws InvariantError at the first thing that does not hold. */
  checkIntegrity(): void {
    this.#queue.checkIntegrity();
    let evictable = 0;
    let locked = 0;
    let evictableLeaves = 0;
    for (const root of this.#roots.values()) {
      invariant(!root.isLeaf, 'radix tree: an empty root');
      const open = [root];
      for (let node = open.pop(); node; node = open.pop()) {
        const { parent, pageCount, lockRefs } = node;
        let childLocks = 0;
        for (const [key, child] of node.children) {
          invariant(child.parent === node, 'radix tree: a child that names another parent');
          invariant(key === this.#childKey(child.tokens, 0), 'radix tree: a child under another key');
          childLocks += child.lockRefs;
          open.push(child);
        }
        if (!parent) continue;
        invariant(pageCount > 0, 'radix tree: a node without pages');
        invariant(node.endPages === parent.endPages + pageCount, 'radix tree: a node that ends elsewhere');
        invariant(lockRefs >= childLocks && node.holdRefs >= 0, 'radix tree: children locked more often than parents');
        for (let i = 0; i < pageCount; i++) {
          const page: number = node!.pages[i]!;
          invariant(this.#nodeOf[page] === node, () => `radix tree: page ${page} is in two nodes`);
        }
        if (lockRefs > 0) locked += pageCount;
        else evictable += pageCount;
        const mayGo = lockRefs === 0 && node.isLeaf;
        if (mayGo) evictableLeaves++;
        invariant(mayGo === node.stamp > 0, 'radix tree: the eviction queue has another idea of a node');
      }
    }
    invariant(evictableLeaves === this.#queue.count, 'radix tree: the eviction queue holds a node that is gone');
    invariant(evictable === this.#evictablePages, () => `radix tree: ${evictable} pages evictable, counted otherwise`);
    invariant(locked === this.#protectedPages, () => `radix tree: ${locked} pages locked, counted otherwise`);
    const inTree = this.#nodeOf.reduce((count, node) => count + (node ? 1 : 0), 0);
    invariant(inTree === this.pageCount, () => `radix tree: ${inTree} pages have a node, ${this.pageCount} are in one`);
  }

  /** The child that goes on with page `at` of `tokens`, split so that it ends within them; undefined: none does. */
  #step(node: RadixNode, tokens: Int32Array, at: number, wanted: number): RadixNode | undefined {
    const { pageTokens } = this;
    const child = node.children.get(this.#childKey(tokens, at * pageTokens));
    if (!child) return undefined;
    const limit = Math.min(child.pageCount, wanted - at) * pageTokens;
    const from = at * pageTokens;
    let same = pageTokens; // the key has shown as much
    while (same < limit && child.tokens[same] === tokens[from + same]) same++;
    const pages = Math.floor(same / pageTokens);
    return pages < child.pageCount ? this.#split(child, pages) : child;
  }

  #childKey(tokens: Int32Array, at: number): ChildKey {
    if (this.pageTokens === 1) return tokens[at]!;
    let key = '';
    for (let i = at; i < at + this.pageTokens; i++) {
      const token = tokens[i]!;
      key += String.fromCharCode(token & 0xffff, token >>> 16);
    }
    return key;
  }

  /** The first `pages` pages of a node become a node of their own, above it; that one is the result. */
  #split(node: RadixNode, pages: number): RadixNode {
    const { pageTokens } = this;
    const parent = node.parent!;
    const head = node.pages.slice(0, pages);
    const upper = new RadixNode(parent, node.tokens.slice(0, pages * pageTokens), head, node.lastAccess, node.priority);
    upper.created = node.created;
    upper.hits = node.hits;
    upper.lockRefs = node.lockRefs;
    parent.children.set(this.#childKey(upper.tokens, 0), upper);
    node.parent = upper;
    node.tokens = node.tokens.slice(pages * pageTokens, node.pageCount * pageTokens);
    node.pages = node.pages.slice(pages, node.pageCount);
    node.pageCount -= pages;
    upper.children.set(this.#childKey(node.tokens, 0), node);
    for (const page of head) this.#nodeOf[page] = upper;
    return upper;
  }

  #addLeaf(parent: RadixNode, tokens: Int32Array, pages: Int32Array, now: number, priority: number): RadixNode {
    const leaf = new RadixNode(parent, tokens, pages, now, priority);
    leaf.hits = 1;
    this.#queue.drop(parent);
    parent.children.set(this.#childKey(tokens, 0), leaf);
    for (const page of pages) this.#nodeOf[page] = leaf;
    this.#evictablePages += pages.length;
    this.#queue.put(leaf);
    return leaf;
  }

  /** A locked leaf gets longer, so that an answer which grows page by page is one node. */
  #grow(leaf: RadixNode, tokens: Int32Array, pages: Int32Array, now: number): void {
    const pageCount = leaf.pageCount + pages.length;
    if (pageCount > leaf.pages.length) {
      leaf.tokens = grown(leaf.tokens, pageCount * this.pageTokens);
      leaf.pages = grown(leaf.pages, pageCount);
    }
    leaf.tokens.set(tokens, leaf.pageCount * this.pageTokens);
    leaf.pages.set(pages, leaf.pageCount);
    leaf.pageCount = pageCount;
    leaf.endPages += pages.length;
    this.#protectedPages += pages.length;
    for (const page of pages) this.#nodeOf[page] = leaf;
    this.#use(leaf, now);
  }

  #remove(leaf: RadixNode): void {
    const parent = leaf.parent!;
    parent.children.delete(this.#childKey(leaf.tokens, 0));
    leaf.parent = undefined;
    this.#evictablePages -= leaf.pageCount;
    if (!parent.isLeaf) return;
    if (!parent.parent) this.#roots.delete(parent.extraKey);
    else if (parent.lockRefs === 0) this.#queue.put(parent);
  }

  /** The leaf ends `pages` earlier, and is as old as before. */
  #trim(leaf: RadixNode, pages: number): void {
    leaf.pageCount -= pages;
    leaf.endPages -= pages;
    this.#evictablePages -= pages;
    this.#queue.put(leaf);
  }

  #recordHit(node: RadixNode, now: number, priority: number): void {
    node.hits++;
    node.priority = Math.max(node.priority, priority);
    this.#use(node, now);
  }

  #use(node: RadixNode, now: number): void {
    node.lastAccess = now;
    if (node.stamp > 0) this.#queue.put(node);
  }

  #rootFor(extraKey: string): RadixNode {
    let root = this.#roots.get(extraKey);
    if (!root) {
      root = new RadixNode(undefined, new Int32Array(0), new Int32Array(0), this.#clock, 0);
      root.extraKey = extraKey;
      this.#roots.set(extraKey, root);
    }
    return root;
  }
}

/** At least twice as long, so that growing one page at a time copies each page a constant number of times. */
function grown(array: Int32Array, length: number): Int32Array {
  const larger = new Int32Array(Math.max(length, 2 * array.length));
  larger.set(array);
  return larger;
}
