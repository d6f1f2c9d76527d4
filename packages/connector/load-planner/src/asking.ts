/**
 * Whether to ask for what lies in none but slower tiers: a lookup costs the way to a process that sleeps, which is a tenth of a short
 * prompt. Where the last answers say that such tiers are slower than computing, the next one would say the same. It is asked again now
 * and then, ever less often: tiers become faster.
 */

/** Of its time: what would still be slower than computing when it took only so much is not asked for. */
const clearlySlower = 0.75;
const againMs = { first: 1_000, most: 60_000 };
/** Sets of tiers; there are never many. */
const maxSets = 32;

export class Asking {
  /** By set of tiers: time per block, as it was last expected. */
  readonly #usPerBlock = new Map<string, number>();
  #askedAtMs = Number.NEGATIVE_INFINITY;
  #againMs = againMs.first;

  /** Blocks of these tiers are expected to take so long, each. */
  told(tiers: string, usPerBlock: number): void {
    if (this.#usPerBlock.has(tiers) || this.#usPerBlock.size < maxSets) this.#usPerBlock.set(tiers, usPerBlock);
  }

  /** Such blocks were worth loading. */
  paid(): void {
    this.#againMs = againMs.first;
  }

  /** To compute the blocks that would be asked for takes `computeUs`. True: they are asked for now. */
  isWorth(blocks: number, computeUs: number, nowMs: number): boolean {
    if (this.#usPerBlock.size === 0) return true;
    const leastUs = Math.min(...this.#usPerBlock.values());
    if (blocks * leastUs * clearlySlower < computeUs) return true;
    if (nowMs - this.#askedAtMs < this.#againMs) return false;
    this.#askedAtMs = nowMs;
    this.#againMs = Math.min(againMs.most, 2 * this.#againMs);
    return true;
  }
}
