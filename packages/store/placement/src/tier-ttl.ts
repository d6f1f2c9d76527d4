/**
 * The time to live of one tier: a block leaves it `ttlS` after this node has seen it come, whoever wrote it; what lay there at
 * the start begins anew. Invariant: bounded by what the tier holds.
 */
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Clock } from '@kvtier/runtime';
import type { Tier } from '@kvtier/tiers';
import type { Counters } from './counters.ts';
import { Expiry } from './expiry.ts';

export class TierTtl {
  readonly #ttlS: number;
  readonly #expiry: Expiry;

  constructor(tier: Tier, ttlS: number, clock: Clock, batchBlocks: number, counters: Counters) {
    this.#ttlS = ttlS;
    this.#expiry = new Expiry({
      clock,
      batchBlocks,
      remove: (namespace, hashes) => {
        counters.add(`expired.blocks.${tier.name}`, tier.remove(namespace, hashes, 'asked'));
      },
    });
  }

  get count(): number {
    return this.#expiry.count;
  }

  get bytes(): number {
    return this.#expiry.bytes;
  }

  /** The tier lists the block from now on, or not any more; `row`: its record in the index. */
  changed(row: number, namespace: Namespace, hash: HashKey, held: boolean): void {
    if (held) this.#expiry.set(row, namespace, hash, this.#ttlS * 1000);
    else this.#expiry.delete(row);
  }

  clear(): void {
    this.#expiry.clear();
  }

  checkIntegrity(): void {
    this.#expiry.checkIntegrity();
  }
}
