/**
 * Blocks a second to a decode side's node, from how hand-offs went: engines leave what they wait for out of their own rates. Where
 * the last of many blocks came well after they were ready, the link was the bottleneck, and that was its rate. Where they came with
 * the prompt's computing, it is as fast as that at least, and as fast as the last ones came of which nothing hid the way: which raises a
 * rate that was measured, and is none where nothing was, but more than what anybody guesses. Where blocks are few it is their way which
 * takes its time.
 */
const weight = 0.25;
/** Of its time, that the last block came after it was ready, for the link to have been what was waited for. */
const bottleneck = 0.2;
const leastS = 0.002;
/** Fewer tell how long a block is under way, not how many go at a time. */
const manyBlocks = 16;
const someBlocks = 4;

export interface Transfer {
  readonly blocks: number;
  /** Of these, those that had not come when the last one was ready. */
  readonly lastBlocks: number;
  /** Seconds, from the first block that was ready to the last one that came; and from the last one that was ready. */
  readonly tookS: number;
  readonly afterS: number;
}

export class LinkRate {
  #perS = 0;
  #atLeast = 0;

  /** 0: it has not been what was waited for. */
  get perS(): number {
    return this.#perS;
  }

  /** As the last blocks came, of late; 0: they were never more than a few. */
  get atLeast(): number {
    return this.#atLeast;
  }

  came({ blocks, lastBlocks, tookS, afterS }: Transfer): void {
    if (blocks < 1) return;
    const seen = blocks / Math.max(tookS, leastS);
    const isBottleneck = blocks >= manyBlocks && afterS > Math.max(leastS, bottleneck * tookS);
    if (isBottleneck) {
      this.#perS = this.#mean(this.#perS, seen);
      this.#atLeast = this.#perS; // what it once was is no bound any more
      return;
    }
    // No time at all: it was told late that the last one was ready. Beside a rate that was measured this says nothing.
    const isTimed = afterS > leastS || this.#perS === 0;
    if (lastBlocks >= someBlocks && isTimed)
      this.#atLeast = this.#mean(this.#atLeast, lastBlocks / Math.max(afterS, leastS));
    if (this.#perS > 0) this.#perS = Math.max(this.#perS, seen, this.#atLeast);
  }

  #mean(perS: number, seen: number): number {
    return perS === 0 ? seen : perS + (seen - perS) * weight;
  }
}
