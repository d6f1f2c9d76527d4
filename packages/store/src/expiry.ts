/**
 * Blocks whose time is over leave all tiers. Buckets of whole seconds; one timer, for the earliest.
 *
 * Invariants: at its second a block is a miss by the index already (`Residency.lookup`); here it is removed, at most
 * `expiryBatchBlocks` in one turn. A block that was made anew meanwhile has another second in the index and stays.
 */
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Clock } from './ports.ts';

interface Due {
  readonly namespace: Namespace;
  readonly hash: HashKey;
}

export interface ExpiryOptions {
  readonly clock: Clock;
  readonly batchBlocks: number;
  /** The second at which the block expires, by the index; 0: never, or it is gone. */
  readonly expiresS: (namespace: Namespace, hash: HashKey) => number;
  readonly remove: (namespace: Namespace, hashes: readonly HashKey[]) => void;
}

export class Expiry {
  readonly #options: ExpiryOptions;
  readonly #buckets = new Map<number, Due[]>();
  #timerS = Number.POSITIVE_INFINITY;
  #cancelTimer: () => void = () => {};

  constructor(options: ExpiryOptions) {
    this.#options = options;
  }

  nowS(): number {
    return Math.floor(this.#options.clock.nowUs() / 1e6);
  }

  add(namespace: Namespace, hash: HashKey, atS: number): void {
    const bucket = this.#buckets.get(atS);
    if (bucket === undefined) this.#buckets.set(atS, [{ namespace, hash }]);
    else bucket.push({ namespace, hash });
    if (atS < this.#timerS) this.#schedule(atS);
  }

  /** Remove what is over now, though its timer has not fired yet. */
  sweep(): void {
    if (this.#timerS > this.nowS()) return;
    this.#cancelTimer();
    this.#run();
  }

  close(): void {
    this.#cancelTimer();
    this.#timerS = Number.POSITIVE_INFINITY;
    this.#buckets.clear();
  }

  #schedule(atS: number): void {
    this.#cancelTimer();
    this.#timerS = atS;
    const ms = Math.max(0, atS * 1000 - this.#options.clock.nowUs() / 1000);
    // Node's timers end at 2^31 - 1 ms; this one is set anew then.
    this.#cancelTimer = this.#options.clock.after(Math.min(Math.ceil(ms), 2 ** 31 - 1), () => this.#run());
  }

  #run(): void {
    this.#timerS = Number.POSITIVE_INFINITY;
    const nowS = this.nowS();
    let left = this.#options.batchBlocks;
    for (const [atS, bucket] of [...this.#buckets].sort(([a], [b]) => a - b)) {
      if (atS > nowS || left === 0) {
        this.#schedule(atS);
        return;
      }
      const due = bucket.splice(0, left);
      left -= due.length;
      if (bucket.length === 0) this.#buckets.delete(atS);
      for (const [namespace, hashes] of this.#over(due, nowS)) this.#options.remove(namespace, hashes);
      if (bucket.length > 0) {
        this.#schedule(atS);
        return;
      }
    }
  }

  /** Those of them that the index says are over, by namespace. */
  #over(due: readonly Due[], nowS: number): Map<Namespace, HashKey[]> {
    const over = new Map<Namespace, HashKey[]>();
    for (const { namespace, hash } of due) {
      const expiresS = this.#options.expiresS(namespace, hash);
      if (expiresS === 0 || expiresS > nowS) continue;
      const hashes = over.get(namespace);
      if (hashes === undefined) over.set(namespace, [hash]);
      else hashes.push(hash);
    }
    return over;
  }
}
