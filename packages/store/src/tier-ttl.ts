/**
 * The time to live of one tier: a block leaves it `ttlS` after this node has seen it come, whoever wrote it; what lay there at
 * the start begins anew. Invariant: bounded by what the tier holds.
 */
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Tier } from '@kvtier/tiers';
import type { Counters } from './counters.ts';
import { Expiry } from './expiry.ts';
import type { Clock } from './ports.ts';

export class TierTtl {
  readonly #ttlS: number;
  readonly #expiry: Expiry;
  /** Second at which each block goes. */
  readonly #ends = new Map<string, number>();

  constructor(tier: Tier, ttlS: number, clock: Clock, batchBlocks: number, counters: Counters) {
    this.#ttlS = ttlS;
    this.#expiry = new Expiry({
      clock,
      batchBlocks,
      expiresS: (namespace, hash) => this.#ends.get(namespace.key + hash) ?? 0,
      remove: (namespace, hashes) => {
        counters.add(`expired.blocks.${tier.name}`, tier.remove(namespace, hashes, 'asked'));
      },
    });
  }

  changed(namespace: Namespace, hash: HashKey, held: boolean): void {
    if (!held) {
      this.#ends.delete(namespace.key + hash);
      return;
    }
    const atS = this.#expiry.nowS() + this.#ttlS;
    this.#ends.set(namespace.key + hash, atS);
    this.#expiry.add(namespace, hash, atS);
  }

  cleared(): void {
    this.#ends.clear();
    this.#expiry.close();
  }

  close(): void {
    this.#expiry.close();
  }
}
