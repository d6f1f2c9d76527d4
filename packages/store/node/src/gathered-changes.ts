/**
 * What tiers come to hold and lose, told a little later and together: a tier says each block of a prompt for itself, and each batch that
 * is published costs every router that reads it a fifth of a millisecond. Like changes in a row become one.
 *
 * Invariants: the listeners hear what the tiers said, in that order; no later than `gatherMs` after the first of it; at most `mostHashes` wait.
 */
import type { TierChange } from '@kvtier/tiers';

type Listener = (change: TierChange) => void;

const mostHashes = 4_096;

export class GatheredChanges {
  #waiting: {
    readonly tell: Listener;
    readonly change: TierChange;
    readonly hashes: TierChange['hashes'][number][];
  }[] = [];
  readonly #gatherMs: number;
  #count = 0;
  #timer: NodeJS.Timeout | undefined;

  /** `gatherMs` 0: each is told at once. */
  constructor(gatherMs: number) {
    this.#gatherMs = gatherMs;
  }

  /** The same, gathered. */
  listener(tell: Listener): Listener {
    return (change) => this.#add(tell, change);
  }

  flush(): void {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    const waiting = this.#waiting;
    this.#waiting = [];
    this.#count = 0;
    for (const { tell, change, hashes } of waiting) tell({ ...change, hashes } as TierChange);
  }

  #add(tell: Listener, change: TierChange): void {
    const last = this.#waiting.at(-1);
    const { kind, namespace, hashes } = change;
    const isLike = last?.tell === tell && last.change.kind === kind && last.change.namespace?.key === namespace?.key;
    if (last !== undefined && isLike) for (const hash of hashes) last.hashes.push(hash);
    else this.#waiting.push({ tell, change, hashes: [...hashes] });
    this.#count += Math.max(hashes.length, 1);
    if (this.#count >= mostHashes || this.#gatherMs === 0) this.flush();
    else this.#timer ??= setTimeout(() => this.flush(), this.#gatherMs);
  }
}
