/**
 * Prefixes that must stay: their blocks are held, so nothing evicts them, until they are unpinned. A system prompt that every
 * request starts with is worth it; everything else is better judged by the eviction policy.
 *
 * Invariants: pins hold at most `maxBlocks` blocks, each counted once however many pins share it, because what they hold
 * cannot serve a request; a pin holds exactly what it found, and gives back exactly that. While anything is pinned a reset is
 * refused, as with every block that is held.
 */
import { invariant, KvError } from '@kvtier/errors';
import { type BlockPool, nullBlock } from './block-pool.ts';
import type { GroupBlocks } from './coordinator.ts';

/** Names of pins are few: each stands for a decision of somebody. */
const maxPins = 1024;

export class PinnedPrefixes {
  readonly #pool: BlockPool;
  readonly #maxBlocks: number;
  readonly #pins = new Map<string, readonly number[]>();
  /** Pins of each block. */
  readonly #counts = new Map<number, number>();

  constructor(pool: BlockPool, maxBlocks: number) {
    this.#pool = pool;
    this.#maxBlocks = maxBlocks;
  }

  /** Blocks that pins hold. */
  get blockCount(): number {
    return this.#counts.size;
  }

  /**
   * Hold the blocks of a hit in place of what this name held; of an empty one nothing is kept. So a pin can be asked for again, and somebody
   * who cannot tell whether it was taken does. Throws KvError CONFIG (too many blocks); what the name held stays then.
   */
  pin(name: string, found: GroupBlocks): void {
    const former = this.#pins.get(name) ?? [];
    const blocks = found.flatMap((column) => column.filter((block) => block !== nullBlock));
    const wanted = new Set(blocks);
    const added = blocks.filter((block) => !this.#counts.has(block)).length;
    const left = former.filter((block) => !wanted.has(block) && this.#countOf(block) === 1).length;
    const isNew = blocks.length > 0 && !this.#pins.has(name);
    if ((isNew && this.#pins.size >= maxPins) || this.#counts.size + added - left > this.#maxBlocks) {
      const held = `${this.#counts.size} of ${this.#maxBlocks} blocks are pinned by ${this.#pins.size} of ${maxPins} names`;
      throw new KvError(
        'CONFIG',
        `pinned prefix ${name}: takes ${added} more, ${held}; unpin others or pin fewer tokens`,
      );
    }
    // Before the former ones are let go: what both hold is not free in between.
    this.#pool.touch(blocks);
    for (const block of blocks) this.#counts.set(block, this.#countOf(block) + 1);
    this.unpin(name);
    if (blocks.length > 0) this.#pins.set(name, blocks);
  }

  /** False when there is no such pin. The last block is let go first, so that the chain is evicted from its tail. */
  unpin(name: string): boolean {
    const blocks = this.#pins.get(name);
    if (!blocks) return false;
    this.#pins.delete(name);
    for (const block of blocks) {
      const left = this.#countOf(block) - 1;
      if (left === 0) this.#counts.delete(block);
      else this.#counts.set(block, left);
    }
    this.#pool.release([...blocks].reverse());
    return true;
  }

  checkIntegrity(): void {
    const counts = new Map<number, number>();
    for (const block of [...this.#pins.values()].flat()) counts.set(block, (counts.get(block) ?? 0) + 1);
    invariant(counts.size === this.#counts.size, () => `pins: ${counts.size} blocks, ${this.#counts.size} counted`);
    invariant(counts.size <= this.#maxBlocks, () => `pins: ${counts.size} blocks, more than ${this.#maxBlocks}`);
    for (const [block, count] of counts) {
      invariant(this.#countOf(block) === count, () => `pins: block ${block} is pinned ${count} times`);
      invariant(this.#pool.refCount(block) >= count, () => `pins: block ${block} is pinned and not held`);
    }
  }

  #countOf(block: number): number {
    return this.#counts.get(block) ?? 0;
  }
}
