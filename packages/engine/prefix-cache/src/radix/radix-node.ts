/**
 * A node of the radix tree: an edge's tokens and the pages that hold their keys and values. Tokens lie in one typed array,
 * pages in another; there is no object per token or page. Only radix-tree.ts changes nodes.
 */

/** A node's first page as a map key: the token itself for pages of one token, else a string of all of them. */
export type ChildKey = number | string;

export class RadixNode {
  /** undefined: a root, or out of the tree. */
  parent: RadixNode | undefined;
  /** Of a root. */
  extraKey = '';
  readonly children = new Map<ChildKey, RadixNode>();
  /** pageCount × pageTokens token ids; the array may be longer, for a node that grows. */
  tokens: Int32Array;
  /** Physical pages; the array may be longer. */
  pages: Int32Array;
  pageCount: number;
  /** Pages from the root to the end of this node. It never changes while anybody but a single holder locks the node. */
  endPages: number;
  /** Holders of this node or of one below it; not 0: it may not be evicted. */
  lockRefs = 0;
  /** Holders among them that do not care where the node ends. */
  holdRefs = 0;
  /** Times on the tree's own clock, which counts operations. */
  lastAccess: number;
  created: number;
  /** Requests that used the node. */
  hits = 0;
  priority: number;
  /** No sequence leads here any more: it goes before all others. */
  isForgotten: boolean;
  /** Which of its entries in the eviction queue is the valid one. */
  stamp = 0;

  constructor(parent: RadixNode | undefined, tokens: Int32Array, pages: Int32Array, now: number, priority: number) {
    this.parent = parent;
    this.tokens = tokens;
    this.pages = pages;
    this.pageCount = pages.length;
    this.endPages = (parent?.endPages ?? 0) + pages.length;
    this.lastAccess = now;
    this.created = now;
    this.priority = priority;
    this.isForgotten = parent?.isForgotten ?? false;
  }

  get isLeaf(): boolean {
    return this.children.size === 0;
  }
}
