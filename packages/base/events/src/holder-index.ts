/**
 * Who holds which block: an index over the event streams of many publishers, for routers.
 *
 * On the wire removal is ambiguous: an engine that holds a block twice says removed once per copy. So every holder
 * (publisher, topic, rank, group, medium) counts how often each hash was stored; it is gone when it was removed as often.
 * A notice (gap, restart) forgets the publisher whole: the view may lack blocks, but does not name dead ones.
 *
 * Bounded: past `maxBlocks` the entries that were announced first go, of the holder that has most; so the view may lack
 * those. Hashes are kept in their integer form, whichever form a publisher sends.
 */
import { invariant } from '@kvtier/errors';
import { type HashKey, integerForm } from '@kvtier/identity';
import type { StreamItem } from './continuity.ts';
import { type BlockHash, type KvEvent, type KvEventBatch, media } from './event.ts';

export interface Holder {
  /** The name under which the stream was applied. */
  readonly source: string;
  readonly topic: string;
  readonly dataParallelRank: number | null;
  readonly group: number;
  readonly medium: string;
}

export interface PrefixMatch extends Holder {
  /** Leading hashes that are all held. */
  readonly blocks: number;
}

export interface HolderIndexStats {
  readonly holders: number;
  readonly blocks: number;
  /** Left out for want of space. */
  readonly droppedBlocks: number;
  /** Removals of what was never stored here: from before we listened. */
  readonly unknownRemovals: number;
  /** Times that a publisher was forgotten. */
  readonly forgotten: number;
}

interface Held {
  readonly holder: Holder;
  /** Integer form → how often it was stored; in the order of the first time. */
  readonly counts: Map<bigint, number>;
}

export class HolderIndex {
  readonly #maxBlocks: number;
  readonly #held = new Map<string, Held>();
  readonly #counts = { droppedBlocks: 0, unknownRemovals: 0, forgotten: 0 };
  #blocks = 0;

  constructor(maxBlocks = 10_000_000) {
    this.#maxBlocks = maxBlocks;
  }

  /** One item of the stream that is called `source`. */
  apply(source: string, item: StreamItem): void {
    if (item.kind === 'batch')
      for (const event of item.batch.events) this.#event(source, item.topic, item.batch, event);
    else this.forget(source);
  }

  /** All that this publisher said. */
  forget(source: string): void {
    this.#counts.forgotten++;
    this.#drop(({ holder }) => holder.source === source);
  }

  /** Who holds this block. */
  holdersOf(hash: BlockHash): Holder[] {
    const key = integerOf(hash);
    return [...this.#held.values()].filter(({ counts }) => counts.has(key)).map(({ holder }) => holder);
  }

  /** How many blocks from the beginning of a chain each holder has; those with none are left out. The longest first. */
  matchPrefix(hashes: readonly BlockHash[], group = 0): PrefixMatch[] {
    const keys = hashes.map(integerOf);
    return [...this.#held.values()]
      .filter(({ holder }) => holder.group === group)
      .map(({ holder, counts }) => {
        const missing = keys.findIndex((key) => !counts.has(key));
        return { ...holder, blocks: missing === -1 ? keys.length : missing };
      })
      .filter(({ blocks }) => blocks > 0)
      .sort((a, b) => b.blocks - a.blocks);
  }

  stats(): HolderIndexStats {
    return { holders: this.#held.size, blocks: this.#blocks, ...this.#counts };
  }

  /** Throws InvariantError when the sums disagree. O(holders). */
  checkIntegrity(): void {
    const blocks = [...this.#held.values()].reduce((sum, { counts }) => sum + counts.size, 0);
    invariant(blocks === this.#blocks, () => `index: ${blocks} blocks held, ${this.#blocks} counted`);
    invariant(blocks <= this.#maxBlocks, () => `index: ${blocks} blocks, ${this.#maxBlocks} allowed`);
  }

  #event(source: string, topic: string, { dataParallelRank }: KvEventBatch, event: KvEvent): void {
    const medium = event.medium ?? media.gpu; // unnamed: as it was, or as vLLM means it
    if (event.type === 'AllBlocksCleared') {
      this.#drop(({ holder }) => {
        const same = holder.source === source && holder.topic === topic && holder.medium === medium;
        return same && holder.dataParallelRank === dataParallelRank;
      });
      return;
    }
    const group = event.groupIdx ?? 0;
    const name = JSON.stringify([source, topic, dataParallelRank, group, medium]);
    let held = this.#held.get(name);
    if (event.type === 'BlockRemoved') {
      for (const hash of event.blockHashes) this.#remove(held, integerOf(hash));
      if (held?.counts.size === 0) this.#held.delete(name);
      return;
    }
    if (event.blockHashes.length === 0) return;
    if (!held) {
      held = { holder: { source, topic, dataParallelRank, group, medium }, counts: new Map() };
      this.#held.set(name, held);
    }
    for (const hash of event.blockHashes) this.#store(held, integerOf(hash));
  }

  #store({ counts }: Held, key: bigint): void {
    const count = counts.get(key) ?? 0;
    if (count === 0) {
      if (this.#blocks >= this.#maxBlocks) this.#makeRoom();
      this.#blocks++;
    }
    counts.set(key, count + 1);
  }

  #remove(held: Held | undefined, key: bigint): void {
    const count = held?.counts.get(key);
    if (held === undefined || count === undefined) {
      this.#counts.unknownRemovals++;
    } else if (count > 1) {
      held.counts.set(key, count - 1);
    } else {
      held.counts.delete(key);
      this.#blocks--;
    }
  }

  /** An eighth of the largest holder goes at once, so that a full index does not look for the largest at every block. */
  #makeRoom(): void {
    let largest: Held | undefined;
    for (const held of this.#held.values()) if (held.counts.size > (largest?.counts.size ?? 0)) largest = held;
    invariant(largest, 'index: full, but nobody holds anything');
    let left = Math.ceil(largest.counts.size / 8);
    for (const key of largest.counts.keys()) {
      if (left-- === 0) break;
      largest.counts.delete(key);
      this.#blocks--;
      this.#counts.droppedBlocks++;
    }
  }

  #drop(which: (held: Held) => boolean): void {
    for (const [name, held] of this.#held) {
      if (!which(held)) continue;
      this.#held.delete(name);
      this.#blocks -= held.counts.size;
    }
  }
}

/** The form in which hashes of all publishers compare. */
export const integerOf = (hash: BlockHash): bigint => (typeof hash === 'bigint' ? hash : integerForm(hash as HashKey));
