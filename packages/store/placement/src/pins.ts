/**
 * Counted pins of arena blocks, for everyone who needs a block to stay: leases, write-downs, Pin.
 *
 * A pinned block that is found corrupt, or has expired, is unlisted at once, and its slot lives on until its last pin goes. Invariant:
 * until then no other block of this name is made, so that an unpin always means the block that was pinned. While it is
 * "leaving" the name counts as not held, and as busy for writers. Only who reads its bytes keeps it so: who pinned it against
 * eviction alone (`Keeper`) is told, and lets go in the same call.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import { type Chain, keysOf } from './chain-words.ts';
import type { ArenaTop } from './ports.ts';

/** Whose pins keep blocks from eviction and protect no copy. */
export interface Keeper {
  /** These are unlisted; it is not said which of them are its own. Its pins of them are to go now. */
  unlisted(hashes: readonly HashKey[]): void;
}

export class Pins {
  readonly #arena: ArenaTop;
  readonly #onIdle: (namespace: Namespace, hash: HashKey) => void;
  /** By namespace: to join the two names costs more than all else that a pin does. */
  readonly #counts = new Map<string, Map<HashKey, number>>();
  #blocks = 0;
  readonly #leaving = new Set<string>();
  /** By namespace; one that pins nothing is not among them. */
  readonly #keepers = new Map<string, Set<Keeper>>();

  /** `onIdle`: nobody pins this block any more. */
  constructor(arena: ArenaTop, onIdle: (namespace: Namespace, hash: HashKey) => void = () => {}) {
    this.#arena = arena;
    this.#onIdle = onIdle;
  }

  /** Blocks that are pinned at least once. */
  get blockCount(): number {
    return this.#blocks;
  }

  /** The block is in the arena. */
  pin(namespace: Namespace, hash: HashKey): void {
    invariant(!this.isLeaving(namespace, hash), 'pin of a block that was removed');
    this.#arena.pin(namespace, hash);
    let counts = this.#counts.get(namespace.key);
    if (counts === undefined) {
      counts = new Map();
      this.#counts.set(namespace.key, counts);
    }
    const count = counts.get(hash) ?? 0;
    if (count === 0) this.#blocks++;
    counts.set(hash, count + 1);
  }

  unpin(namespace: Namespace, hash: HashKey): void {
    const counts = this.#counts.get(namespace.key);
    const count = counts?.get(hash);
    invariant(counts !== undefined && count !== undefined, 'unpin of a block that is not pinned');
    this.#arena.unpin(namespace, hash);
    if (count > 1) {
      counts.set(hash, count - 1);
      return;
    }
    counts.delete(hash);
    if (counts.size === 0) this.#counts.delete(namespace.key);
    this.#blocks--;
    if (this.#leaving.size > 0) this.#leaving.delete(namespace.key + hash);
    this.#onIdle(namespace, hash);
  }

  isPinned(namespace: Namespace, hash: HashKey): boolean {
    return this.#counts.get(namespace.key)?.has(hash) ?? false;
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

  /** From now on it hears what is unlisted. */
  follow({ key }: Namespace, keeper: Keeper): void {
    const keepers = this.#keepers.get(key);
    if (keepers === undefined) this.#keepers.set(key, new Set([keeper]));
    else keepers.add(keeper);
  }

  unfollow({ key }: Namespace, keeper: Keeper): void {
    const keepers = this.#keepers.get(key);
    if (keepers?.delete(keeper) && keepers.size === 0) this.#keepers.delete(key);
  }

  /** Unlist blocks now. */
  remove(namespace: Namespace, hashes: readonly HashKey[], reason: 'corrupt' | 'asked'): void {
    const pinned = hashes.filter(
      (hash) => this.isPinned(namespace, hash) && this.#arena.get(namespace, hash) !== undefined,
    );
    for (const hash of pinned) this.#leaving.add(namespace.key + hash);
    this.#arena.remove(namespace, hashes, reason);
    if (pinned.length === 0) return;
    for (const keeper of this.#keepers.get(namespace.key) ?? []) keeper.unlisted(pinned);
  }
}
