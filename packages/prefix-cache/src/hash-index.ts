/**
 * Which block holds a hash. Nearly always one; two requests that compute the same block at the same time keep both
 * (tables are append-only, so neither can be replaced), and then the first inserted survivor answers.
 * Invariant: an array value is in order of insertion and never empty. After vLLM's BlockHashToBlockMap.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';

export class HashIndex {
  readonly #blocks = new Map<HashKey, number | number[]>();

  /** Distinct hashes. */
  get keyCount(): number {
    return this.#blocks.size;
  }

  get(hash: HashKey): number | undefined {
    const held = this.#blocks.get(hash);
    return typeof held === 'object' ? held[0] : held;
  }

  add(hash: HashKey, block: number): void {
    const held = this.#blocks.get(hash);
    if (held === undefined) this.#blocks.set(hash, block);
    else if (typeof held === 'number') this.#blocks.set(hash, [held, block]);
    else held.push(block);
  }

  remove(hash: HashKey, block: number): void {
    const held = this.#blocks.get(hash);
    if (held === block) {
      this.#blocks.delete(hash);
      return;
    }
    invariant(typeof held === 'object', () => `hash index: block ${block} is not held under its hash`);
    const at = held.indexOf(block);
    invariant(at !== -1, () => `hash index: block ${block} is not held under its hash`);
    held.splice(at, 1);
    if (held.length === 0) this.#blocks.delete(hash);
  }

  clear(): void {
    this.#blocks.clear();
  }

  /** Every (hash, block) pair. For integrity checks. */
  *entries(): Generator<readonly [HashKey, number]> {
    for (const [hash, held] of this.#blocks) {
      if (typeof held === 'number') yield [hash, held];
      else for (const block of held) yield [hash, block];
    }
  }
}
