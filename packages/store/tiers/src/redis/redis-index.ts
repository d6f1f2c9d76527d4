/**
 * What Redis holds, as far as this node knows: the directory's entries in memory, for `lookup`, and those who follow. Invariant:
 * followers are told exactly when `lookup` changes.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import { SliceTimer } from '@kvtier/runtime';
import { Followers, pagesOfMap } from '../kit/followers.ts';
import type { Following, TierChange } from '../kit/tier.ts';

/** Looked at between two looks at the time. */
const sliceBlocks = 256;

export interface IndexEntry {
  /** "bytes partBytes valueId", as the directory has it; another text is another value. */
  readonly text: string;
  /** Its last use that this node knows of, on the clock of `ServerRecency`; 0: none. */
  usedUs: number;
}

interface Space {
  readonly namespace: Namespace;
  readonly blocks: Map<HashKey, IndexEntry>;
}

export class RedisIndex {
  readonly #spaces = new Map<string, Space>();
  readonly #followers = new Followers();
  #count = 0;

  get count(): number {
    return this.#count;
  }

  get(namespace: Namespace, hash: HashKey): IndexEntry | undefined {
    return this.#spaces.get(namespace.key)?.blocks.get(hash);
  }

  /** Blocks held from the first hash on, without a gap. */
  prefix(namespace: Namespace, hashes: readonly HashKey[]): number {
    const blocks = this.#spaces.get(namespace.key)?.blocks;
    let held = 0;
    while (held < hashes.length && blocks?.has(hashes[held]!)) held++;
    return held;
  }

  /** A block is held, or has a new value. */
  set(namespace: Namespace, hash: HashKey, text: string, usedUs = 0): void {
    let space = this.#spaces.get(namespace.key);
    if (space === undefined) {
      space = { namespace, blocks: new Map() };
      this.#spaces.set(namespace.key, space);
    }
    const before = space.blocks.get(hash);
    if (before?.text === text) return;
    space.blocks.set(hash, { text, usedUs });
    if (before !== undefined) return;
    this.#count++;
    this.#followers.stored(namespace, [hash]);
  }

  /** Returns whether it was held, with this value if one is named. */
  remove(namespace: Namespace, hash: HashKey, text?: string): boolean {
    const space = this.#spaces.get(namespace.key);
    const entry = space?.blocks.get(hash);
    if (entry === undefined || (text !== undefined && entry.text !== text)) return false;
    space!.blocks.delete(hash);
    if (space!.blocks.size === 0) this.#spaces.delete(namespace.key);
    this.#count--;
    this.#followers.removed(namespace, [hash]);
    return true;
  }

  /** Those with such a hash are held no more: a slice of them a turn. */
  async removeAll(isGone: (hash: HashKey) => boolean): Promise<void> {
    const timer = new SliceTimer();
    for (const [key, space] of this.#spaces) {
      let looked = 0;
      let gone: HashKey[] = [];
      for (const hash of space.blocks.keys()) {
        if (isGone(hash)) gone.push(hash);
        if (++looked % sliceBlocks > 0) continue;
        this.#removeSome(space, gone);
        gone = [];
        if (!timer.due) continue;
        await timer.next();
        // Dropped as a whole meanwhile.
        if (this.#spaces.get(key) !== space) break;
      }
      this.#removeSome(space, gone);
    }
  }

  clear(): void {
    this.#spaces.clear();
    this.#count = 0;
    this.#followers.cleared();
  }

  follow(listener: (change: TierChange) => void): () => void {
    const held = [...this.#spaces.values()].map(({ namespace, blocks }) => [namespace, [...blocks.keys()]] as const);
    return this.#followers.follow(listener, held);
  }

  followInPages(listener: (change: TierChange) => void): Following {
    return this.#followers.followInPages(
      listener,
      pagesOfMap(
        this.#spaces,
        ({ blocks }) => blocks,
        ({ namespace }) => namespace,
      ),
    );
  }

  #removeSome({ namespace, blocks }: Space, hashes: readonly HashKey[]): void {
    if (hashes.length === 0) return;
    for (const hash of hashes) blocks.delete(hash);
    if (blocks.size === 0) this.#spaces.delete(namespace.key);
    this.#count -= hashes.length;
    this.#followers.removed(namespace, hashes);
  }

  checkIntegrity(): void {
    let count = 0;
    for (const { blocks } of this.#spaces.values()) {
      invariant(blocks.size > 0, 'redis: an empty namespace is listed');
      count += blocks.size;
    }
    invariant(count === this.#count, 'redis: the index does not count what it lists');
  }
}
