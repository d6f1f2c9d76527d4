/**
 * What the disk tier holds: by namespace and hash, an entry that says where. In memory only; recovery rebuilds it.
 * Invariant: an entry is listed here, counted in its segment, and marked `listed`, all three or none.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import { Followers } from '../followers.ts';
import type { TierChange } from '../tier.ts';
import type { DiskEntry, Segment } from './segment.ts';

export class BlockIndex {
  readonly #blocks = new Map<string, Map<HashKey, DiskEntry>>();
  readonly #followers = new Followers();
  /** Out of service: what is listed here counts as not held. */
  #hidden = false;
  /** The logical clock of recency. */
  #tick = 0;
  count = 0;

  get(namespace: Namespace, hash: HashKey): DiskEntry | undefined {
    return this.#blocks.get(namespace.key)?.get(hash);
  }

  of(namespace: Namespace): ReadonlyMap<HashKey, DiskEntry> | undefined {
    return this.#blocks.get(namespace.key);
  }

  follow(listener: (change: TierChange) => void): () => void {
    const held = [...this.#blocks.values()].flatMap((blocks) => {
      const [first] = blocks.values();
      return first === undefined || this.#hidden ? [] : [[first.namespace, [...blocks.keys()]] as const];
    });
    return this.#followers.follow(listener, held);
  }

  /** From now on nothing counts as held. */
  hide(): void {
    this.#hidden = true;
    this.#followers.cleared();
  }

  /** List a block; one of the same name before it is forgotten. `lastUse` keeps a recency from before. */
  add(namespace: Namespace, hash: HashKey, segment: Segment, page: number, pages: number, lastUse?: number): DiskEntry {
    let blocks = this.#blocks.get(namespace.key);
    if (blocks === undefined) {
      blocks = new Map();
      this.#blocks.set(namespace.key, blocks);
    }
    const before = blocks.get(hash);
    if (before !== undefined) this.#unlist(before);
    const use = lastUse ?? ++this.#tick;
    this.#tick = Math.max(this.#tick, use);
    const entry: DiskEntry = { namespace, hash, segment, page, pages, lastUse: use, hot: false, listed: true };
    blocks.set(hash, entry);
    segment.entries.push(entry);
    segment.listedCount++;
    segment.useSum += use;
    this.count++;
    if (before === undefined && !this.#hidden) this.#followers.stored(namespace, [hash]);
    return entry;
  }

  touch(entry: DiskEntry): void {
    const use = ++this.#tick;
    entry.segment.useSum += use - entry.lastUse;
    entry.lastUse = use;
    entry.hot = true;
  }

  remove(entry: DiskEntry): void {
    const blocks = this.#blocks.get(entry.namespace.key);
    invariant(blocks?.get(entry.hash) === entry, 'disk: an entry is not where it says');
    blocks.delete(entry.hash);
    if (blocks.size === 0) this.#blocks.delete(entry.namespace.key);
    this.#unlist(entry);
    if (!this.#hidden) this.#followers.removed(entry.namespace, [entry.hash]);
  }

  checkIntegrity(segments: Iterable<Segment>): void {
    let listed = 0;
    for (const segment of segments) {
      const live = segment.entries.filter((entry) => entry.listed);
      invariant(live.length === segment.listedCount, 'disk: a segment miscounts its blocks');
      const useSum = live.reduce((sum, entry) => sum + entry.lastUse, 0);
      invariant(useSum === segment.useSum, 'disk: a segment miscounts its recency');
      invariant(segment.state !== 'free' || live.length === 0, 'disk: a free segment lists blocks');
      for (const entry of live) {
        invariant(this.get(entry.namespace, entry.hash) === entry, 'disk: a listed block is not in the index');
        invariant((entry.page + entry.pages) * 4096 <= segment.tail, 'disk: a block lies beyond the tail');
      }
      listed += live.length;
    }
    let indexed = 0;
    for (const blocks of this.#blocks.values()) indexed += blocks.size;
    invariant(listed === this.count && indexed === this.count, 'disk: index and segments disagree');
  }

  #unlist(entry: DiskEntry): void {
    entry.listed = false;
    entry.segment.listedCount--;
    entry.segment.useSum -= entry.lastUse;
    this.count--;
  }
}
