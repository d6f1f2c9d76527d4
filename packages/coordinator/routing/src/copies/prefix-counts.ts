/**
 * How often prompts come that begin alike: a tree of prefixes, each with the rate of the prompts that have it.
 *
 *     root ── system prompt ─┬─ document A ── question         a node ends where prompts part: what is above it is the prefix
 *                            └─ document B ── question         that they share
 *
 * A chain hash names its block and all before it, so an edge is followed by its last equal hash, found by bisection. Two rates each, over
 * `fastMs` and `slowMs` (decaying counts, corrected for the time since the first): where the first is above the second, more are
 * coming.
 *
 * Bounded: at most `maxNodes` nodes and `maxBlocks` hashes; when that is reached, what is asked for least goes.
 */
import type { Keys } from '@kvtier/kv-index';

export interface PrefixCountsOptions {
  readonly maxNodes: number;
  readonly maxBlocks: number;
}

/** A prefix that prompts share. `T`: what is kept of one of them. */
export interface Prefix<T> {
  /** Blocks from the root on. */
  readonly blocks: number;
  /** Of prompts that have it: tokens behind it, and of their answers, on average. */
  readonly tailTokens: number;
  readonly answerTokens: number;
  /** Prompts that had it. */
  readonly arrivals: number;
  kept: T | undefined;
}

const fastMs = 2_000;
const slowMs = 30_000;
/** A share of the younger ones in an average. */
const fresh = 0.2;

class Node<T> implements Prefix<T> {
  /** Hashes from the parent's end on. */
  keys: Keys;
  from: number;
  parent: Node<T> | undefined;
  readonly children = new Map<number, Node<T>>();
  kept: T | undefined;
  tailTokens = 0;
  answerTokens = 0;
  arrivals = 0;
  #fast = 0;
  #slow = 0;
  #atMs: number;
  #sinceMs: number;

  constructor(parent: Node<T> | undefined, keys: Keys, from: number, nowMs: number) {
    this.parent = parent;
    this.keys = keys;
    this.from = from;
    this.#atMs = nowMs;
    this.#sinceMs = nowMs;
  }

  get blocks(): number {
    return this.from + this.keys.length / 2;
  }

  came(nowMs: number, tailTokens: number, answerTokens: number): void {
    const ms = Math.max(nowMs - this.#atMs, 0);
    this.#fast = this.#fast * Math.exp(-ms / fastMs) + 1;
    this.#slow = this.#slow * Math.exp(-ms / slowMs) + 1;
    this.#atMs = nowMs;
    const share = this.arrivals === 0 ? 1 : fresh;
    this.tailTokens += share * (tailTokens - this.tailTokens);
    this.answerTokens += share * (answerTokens - this.answerTokens);
    this.arrivals++;
  }

  /** The same prompts had what is above them. */
  above(keys: Keys, blockTokens: number): Node<T> {
    const upper = new Node<T>(this.parent, keys, this.from, this.#sinceMs);
    upper.#fast = this.#fast;
    upper.#slow = this.#slow;
    upper.#atMs = this.#atMs;
    upper.arrivals = this.arrivals;
    upper.tailTokens = this.tailTokens + (this.blocks - upper.blocks) * blockTokens;
    upper.answerTokens = this.answerTokens;
    return upper;
  }

  /** Prompts a second that are expected: as many as lately, and more where their number grows. */
  perS(nowMs: number): number {
    const fast = this.#rate(this.#fast, fastMs, nowMs);
    const slow = this.#rate(this.#slow, slowMs, nowMs);
    return fast > slow ? 2 * fast - slow : slow;
  }

  /** Of how much use it is to count it, for what is thrown away. */
  worth(nowMs: number): number {
    return this.#slow * Math.exp(-Math.max(nowMs - this.#atMs, 0) / slowMs);
  }

  #rate(count: number, overMs: number, nowMs: number): number {
    const left = count * Math.exp(-Math.max(nowMs - this.#atMs, 0) / overMs);
    // What is known for a moment only says little: as if it were known for a quarter of the time.
    const knownMs = Math.max(nowMs - this.#sinceMs, overMs / 4);
    return (1000 * left) / (overMs * (1 - Math.exp(-knownMs / overMs)));
  }
}

export class PrefixCounts<T> {
  readonly #options: PrefixCountsOptions;
  readonly #root = new Node<T>(undefined, new Int32Array(0), 0, 0);
  #nodes = 0;
  #blocks = 0;
  #releasedBlocks = 0;

  constructor(options: PrefixCountsOptions) {
    this.#options = options;
  }

  get nodes(): number {
    return this.#nodes;
  }

  get blocks(): number {
    return this.#blocks;
  }

  /** A prompt with these blocks came. `each` is told each prefix that an earlier one had, too, the shortest first. */
  came(
    { keys, tokens, blockTokens, maxTokens }: Asked,
    nowMs: number,
    each: (prefix: Prefix<T>, perS: number) => void,
  ): void {
    const count = Math.min(keys.length / 2, this.#options.maxBlocks >> 2);
    let node = this.#root;
    let at = 0;
    while (at < count) {
      const next = node.children.get(keys[2 * at]!);
      if (next === undefined) {
        this.#add(node, keys.slice(2 * at, 2 * count), at, nowMs).came(nowMs, tokens - count * blockTokens, maxTokens);
        break;
      }
      const same = alike(next, keys, count);
      if (same === 0) break; // the first half of two hashes is the same: the later one is not counted
      node = same < next.keys.length / 2 ? this.#split(next, same, blockTokens) : next;
      at += same;
      node.came(nowMs, Math.max(tokens - at * blockTokens, 0), maxTokens);
      each(node, node.perS(nowMs));
    }
    if (this.#nodes > this.#options.maxNodes || this.#blocks > this.#options.maxBlocks) this.#forget(nowMs);
  }

  /** Blocks of prefixes of which something was kept, and which have been forgotten since this was asked last. */
  releasedBlocks(): number {
    const blocks = this.#releasedBlocks;
    this.#releasedBlocks = 0;
    return blocks;
  }

  /** Prefixes that `arrivals` prompts or more had, with their expected rate and hashes, in no order. */
  *all(nowMs: number, arrivals: number): Generator<{ prefix: Prefix<T>; perS: number }> {
    const left = [...this.#root.children.values()];
    for (let node = left.pop(); node !== undefined; node = left.pop()) {
      // Who is below had no more than it.
      if (node.arrivals < arrivals) continue;
      yield { prefix: node, perS: node.perS(nowMs) };
      for (const child of node.children.values()) left.push(child);
    }
  }

  #add(parent: Node<T>, keys: Keys, from: number, nowMs: number): Node<T> {
    const node = new Node<T>(parent, keys, from, nowMs);
    parent.children.set(keys[0]!, node);
    this.#nodes++;
    this.#blocks += keys.length / 2;
    return node;
  }

  #split(node: Node<T>, blocks: number, blockTokens: number): Node<T> {
    const upper = node.above(node.keys.slice(0, 2 * blocks), blockTokens);
    node.parent!.children.set(upper.keys[0]!, upper);
    node.parent = upper;
    node.from += blocks;
    node.keys = node.keys.slice(2 * blocks);
    upper.children.set(node.keys[0]!, node);
    this.#nodes++;
    return upper;
  }

  /** Leaves go, those first that are asked for least, until a quarter is free. */
  #forget(nowMs: number): void {
    const { maxNodes, maxBlocks } = this.#options;
    const isFull = (): boolean => this.#nodes > maxNodes * 0.75 || this.#blocks > maxBlocks * 0.75;
    while (isFull()) {
      const leaves: { node: Node<T>; worth: number }[] = [];
      const left = [...this.#root.children.values()];
      for (let node = left.pop(); node !== undefined; node = left.pop()) {
        if (node.children.size === 0) leaves.push({ node, worth: node.worth(nowMs) });
        else for (const child of node.children.values()) left.push(child);
      }
      leaves.sort((a, b) => a.worth - b.worth);
      for (const { node } of leaves) {
        if (!isFull()) return;
        node.parent!.children.delete(node.keys[0]!);
        this.#nodes--;
        this.#blocks -= node.keys.length / 2;
        if (node.kept !== undefined) this.#releasedBlocks += node.blocks;
      }
    }
  }
}

type Asked = { readonly keys: Keys; readonly tokens: number; readonly blockTokens: number; readonly maxTokens: number };

/** How many of the node's blocks the prompt has. */
function alike(node: Node<unknown>, keys: Keys, count: number): number {
  const has = (at: number): boolean =>
    keys[2 * (node.from + at)] === node.keys[2 * at] && keys[2 * (node.from + at) + 1] === node.keys[2 * at + 1];
  let low = 0;
  let high = Math.min(node.keys.length / 2, count - node.from);
  while (low < high) {
    const middle = (low + high + 1) >>> 1;
    if (has(middle - 1)) low = middle;
    else high = middle - 1;
  }
  return low;
}
