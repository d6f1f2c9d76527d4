/**
 * Blocks a second to a decode side's node, from how hand-offs went: engines leave what they wait for out of their own rates. Where
 * the last of many blocks came well after they were ready, the link was the bottleneck, and that was its rate. Where they came with
 * the prompt's computing, or where they are so few that it is their way which takes its time, it is as fast as that at least: which
 * raises a rate that was measured, and is none where nothing was.
 */
const weight = 0.25;
/** Of its time, that the last block came after it was ready, for the link to have been what was waited for. */
const bottleneck = 0.2;
const leastS = 0.002;
/** Fewer tell how long a block is under way, not how many go at a time. */
const manyBlocks = 16;

export interface Transfer {
  readonly blocks: number;
  /** Seconds, from the first block that was ready to the last one that came; and from the last one that was ready. */
  readonly tookS: number;
  readonly afterS: number;
}

export class LinkRate {
  #perS = 0;

  /** 0: it has not been what was waited for. */
  get perS(): number {
    return this.#perS;
  }

  came({ blocks, tookS, afterS }: Transfer): void {
    if (blocks < 1) return;
    const seen = blocks / Math.max(tookS, leastS);
    const isBottleneck = blocks >= manyBlocks && afterS > Math.max(leastS, bottleneck * tookS);
    if (!isBottleneck) this.#perS = this.#perS === 0 ? 0 : Math.max(this.#perS, seen);
    else this.#perS = this.#perS === 0 ? seen : this.#perS + (seen - this.#perS) * weight;
  }
}
