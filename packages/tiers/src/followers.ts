/**
 * Those who follow a tier's changes (`Tier.follow`). Invariant: a follower sees what was held when it came, then every change
 * once, in order; one that throws is a defect and the throw is the tier's caller's.
 */
import type { HashKey, Namespace } from '@kvtier/identity';
import type { TierChange } from './tier.ts';

export class Followers {
  readonly #listeners = new Set<(change: TierChange) => void>();

  /** `held`: all that the tier lists now, with the end of each object where it is known. */
  follow(
    listener: (change: TierChange) => void,
    held: Iterable<readonly [Namespace, readonly HashKey[], (readonly number[])?]>,
  ): () => void {
    for (const [namespace, hashes, expiresS] of held) listener({ kind: 'stored', namespace, hashes, expiresS });
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  /** Nobody follows: a tier may skip the work of telling. */
  get none(): boolean {
    return this.#listeners.size === 0;
  }

  stored(namespace: Namespace, hashes: readonly HashKey[], expiresS?: readonly number[]): void {
    this.#tell({ kind: 'stored', namespace, hashes, expiresS });
  }

  removed(namespace: Namespace, hashes: readonly HashKey[]): void {
    this.#tell({ kind: 'removed', namespace, hashes });
  }

  cleared(): void {
    this.#tell({ kind: 'cleared', namespace: null, hashes: [] });
  }

  #tell(change: TierChange): void {
    if (change.kind !== 'cleared' && change.hashes.length === 0) return;
    for (const listener of this.#listeners) listener(change);
  }
}
