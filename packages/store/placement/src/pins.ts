/**
 * Counted pins of arena blocks, for everyone who needs a block to stay: leases, write-downs, Pin.
 *
 * A pinned block that is found corrupt, or has expired, is unlisted at once, and its slot lives on until its last pin goes. Invariant:
 * until then no other block of this name is made, so that an unpin always means the block that was pinned. While it is
 * "leaving" the name counts as not held, and as busy for writers.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import { type Chain, keysOf } from './chain-words.ts';
import type { ArenaTop } from './ports.ts';

export class Pins {
  readonly #arena: ArenaTop;
  readonly #counts = new Map<string, number>();
  readonly #leaving = new Set<string>();

  constructor(arena: ArenaTop) {
    this.#arena = arena;
  }

  /** Blocks that are pinned at least once. */
  get blockCount(): number {
    return this.#counts.size;
  }

  /** The block is in the arena. */
  pin(namespace: Namespace, hash: HashKey): void {
    const key = namespace.key + hash;
    invariant(!this.#leaving.has(key), 'pin of a block that was removed');
    this.#arena.pin(namespace, hash);
    this.#counts.set(key, (this.#counts.get(key) ?? 0) + 1);
  }

  unpin(namespace: Namespace, hash: HashKey): void {
    const key = namespace.key + hash;
    const count = this.#counts.get(key);
    invariant(count !== undefined, 'unpin of a block that is not pinned');
    this.#arena.unpin(namespace, hash);
    if (count > 1) this.#counts.set(key, count - 1);
    else {
      this.#counts.delete(key);
      this.#leaving.delete(key);
    }
  }

  isPinned(namespace: Namespace, hash: HashKey): boolean {
    return this.#counts.size > 0 && this.#counts.has(namespace.key + hash);
  }

  isLeaving(namespace: Namespace, hash: HashKey): boolean {
    return this.#leaving.size > 0 && this.#leaving.has(namespace.key + hash);
  }

  /** Index of the first of the chain's first `count` blocks that is leaving, `count` when none is. */
  firstLeaving(namespace: Namespace, chain: Chain, count: number): number {
    if (this.#leaving.size === 0) return count;
    const leaving = keysOf(chain, 0, count).findIndex((hash) => this.isLeaving(namespace, hash));
    return leaving === -1 ? count : leaving;
  }

  /** Unlist blocks now. */
  remove(namespace: Namespace, hashes: readonly HashKey[], reason: 'corrupt' | 'asked'): void {
    for (const hash of hashes) {
      const key = namespace.key + hash;
      if (this.#counts.has(key) && this.#arena.get(namespace, hash) !== undefined) this.#leaving.add(key);
    }
    this.#arena.remove(namespace, hashes, reason);
  }
}
