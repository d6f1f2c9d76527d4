/**
 * Tells the tiers which blocks were used. A lookup of a long chain must not wait for that: what is beyond one batch is told
 * in later turns, a batch each, from the chain's tail on, so that parents end up at least as recent as their children.
 *
 * Invariants: at most `maxTouchBlocks` wait; only tiers that held a block when it was used hear of it, or where that was not told when
 * they hear of it.
 */
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Clock } from '@kvtier/runtime';
import type { Tier } from '@kvtier/tiers';
import { type Chain, keysOf } from './chain-words.ts';
import type { Counters } from './counters.ts';
import type { StoreLimits } from './limits.ts';
import type { Residency } from './residency.ts';

export interface RecencyOptions {
  /** By bit: the arena, then the lower ones. */
  readonly tiers: readonly Pick<Tier, 'touch'>[];
  readonly residency: Residency;
  readonly clock: Clock;
  readonly limits: StoreLimits;
  readonly counters: Counters;
}

interface Use {
  readonly namespace: Namespace;
  readonly chain: Chain;
  /** Undefined: they are looked up when their batch is told. */
  readonly found: Uint8Array | undefined;
  /** What is left to tell: blocks 0 to `left`. */
  left: number;
}

export class Recency {
  readonly #options: RecencyOptions;
  readonly #queue: Use[] = [];
  #pendingBlocks = 0;
  #cancelTurn: (() => void) | undefined;

  constructor(options: RecencyOptions) {
    this.#options = options;
  }

  get pendingBlocks(): number {
    return this.#pendingBlocks;
  }

  /** The first `count` blocks of the chain were used; `found`: the tiers of each, when they are known. */
  used(namespace: Namespace, chain: Chain, count: number, found?: Uint8Array): void {
    if (count === 0) return;
    const { limits, counters } = this.#options;
    if (count <= limits.touchBatchBlocks) {
      this.#touch(namespace, keysOf(chain, 0, count), found);
      return;
    }
    if (this.#pendingBlocks + count > limits.maxTouchBlocks) {
      counters.add('touch.dropped.queue_full', count);
      return;
    }
    // Both belong to the caller, who will use them again.
    const own = 'packed' in chain ? { ...chain, packed: chain.packed.slice(0, count * chain.hashBytes) } : chain;
    this.#queue.push({ namespace, chain: own, found: found?.slice(0, count), left: count });
    this.#pendingBlocks += count;
    this.#schedule();
  }

  /** What is still to be told is dropped. */
  close(): void {
    this.#cancelTurn?.();
    this.#queue.length = 0;
    this.#pendingBlocks = 0;
  }

  #schedule(): void {
    this.#cancelTurn ??= this.#options.clock.after(0, () => {
      this.#cancelTurn = undefined;
      const use = this.#queue[0]!;
      const from = Math.max(0, use.left - this.#options.limits.touchBatchBlocks);
      this.#touch(use.namespace, keysOf(use.chain, from, use.left), use.found?.subarray(from, use.left));
      this.#pendingBlocks -= use.left - from;
      use.left = from;
      if (from === 0) this.#queue.shift();
      if (this.#queue.length > 0) this.#schedule();
    });
  }

  #touch(namespace: Namespace, keys: readonly HashKey[], known: Uint8Array | undefined): void {
    const { residency } = this.#options;
    const found = known ?? Uint8Array.from(keys, (hash) => residency.tiers(namespace, hash));
    let any = 0;
    for (let at = 0; at < keys.length; at++) any |= found[at]!;
    for (const [bit, tier] of this.#options.tiers.entries()) {
      if ((any & (1 << bit)) === 0) continue;
      tier.touch(
        namespace,
        keys.filter((_, at) => (found[at]! & (1 << bit)) !== 0),
      );
    }
  }
}
