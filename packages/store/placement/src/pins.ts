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

interface Pinned {
  readonly counts: Map<HashKey, number>;
  /** Of one of its blocks, as of all others. */
  readonly payloadBytes: number;
}

export class Pins {
  readonly #arena: ArenaTop;
  readonly #onIdle: (namespace: Namespace, hash: HashKey) => void;
  /** By namespace: to join the two names costs more than all else that a pin does. */
  readonly #pinned = new Map<string, Pinned>();
  #blocks = 0;
  #bytes = 0;
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

  /** The payloads of these. */
  get bytes(): number {
    return this.#bytes;
  }

  /** The block is in the arena. */
  pin(namespace: Namespace, hash: HashKey): void {
    invariant(!this.isLeaving(namespace, hash), 'pin of a block that was removed');
    this.#arena.pin(namespace, hash);
    let pinned = this.#pinned.get(namespace.key);
    if (pinned === undefined) {
      pinned = { counts: new Map(), payloadBytes: this.#arena.get(namespace, hash)!.payloadBytes };
      this.#pinned.set(namespace.key, pinned);
    }
    const count = pinned.counts.get(hash) ?? 0;
    if (count === 0) this.#add(1, pinned);
    pinned.counts.set(hash, count + 1);
  }

  unpin(namespace: Namespace, hash: HashKey): void {
    const pinned = this.#pinned.get(namespace.key);
    const count = pinned?.counts.get(hash);
    invariant(pinned !== undefined && count !== undefined, 'unpin of a block that is not pinned');
    this.#arena.unpin(namespace, hash);
    if (count > 1) {
      pinned.counts.set(hash, count - 1);
      return;
    }
    pinned.counts.delete(hash);
    if (pinned.counts.size === 0) this.#pinned.delete(namespace.key);
    this.#add(-1, pinned);
    if (this.#leaving.size > 0) this.#leaving.delete(namespace.key + hash);
    this.#onIdle(namespace, hash);
  }

  isPinned(namespace: Namespace, hash: HashKey): boolean {
    return this.#pinned.get(namespace.key)?.counts.has(hash) ?? false;
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

  #add(blocks: number, { payloadBytes }: Pinned): void {
    this.#blocks += blocks;
    this.#bytes += blocks * payloadBytes;
  }
}
