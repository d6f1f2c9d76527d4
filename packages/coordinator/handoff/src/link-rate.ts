/**
 * Blocks a second to a decode side's node, from how hand-offs went: engines leave what they wait for out of their own rates. Where
 * the last of many blocks came well after they were ready, the link was the bottleneck, and that was its rate. Where they came with
 * the prompt's computing, it is as fast as that at least, and as fast as the last ones came of which nothing hid the way: which raises a
 * rate that was measured, and is none where nothing was, but more than what anybody guesses. Where blocks are few it is their way which
 * takes its time. Hand-offs to one node share its link: the rate of one that waited for it is that of all blocks that came meanwhile.
 *
 * A link that stood still once is not a slow one: a first measurement that is far less than all else that is known waits for a second one.
 * And what was measured is forgotten: by a rate that is too low nothing travels any more, and nothing would correct it.
 */
const weight = 0.25;
/** Rates that are more than so many times each other are not alike: a first measurement among them may be an accident. */
const farMore = 2;
/**
 * Without a measurement for so long, or for as long as it has been measured alike, a block is believed to take half as long. So a link that
 * stood still for seconds takes prompts again after some minutes. One that is really slow is tried as well, and after each time that was in
 * vain more seldom: where prompts pay only at eight times its rate, after three minutes first, every three quarters of an hour at last.
 */
const halfMs = { least: 60_000, most: 960_000 };
/** By then any link is believed to be as fast as need be. */
const mostHalves = 20;
/** Of its time, that the last block came after it was ready, for the link to have been what was waited for. */
const bottleneck = 0.2;
const leastS = 0.002;
/** Fewer tell how long a block is under way, not how many go at a time. */
const manyBlocks = 16;
const someBlocks = 4;

export interface Transfer {
  readonly blocks: number;
  /** That came to the node meanwhile, these and those of other hand-offs; absent: these alone. */
  readonly allBlocks?: number;
  /** Of these, those that had not come when the last one was ready. */
  readonly lastBlocks: number;
  /** Seconds, from the first block that was ready to the last one that came; and from the last one that was ready. */
  readonly tookS: number;
  readonly afterS: number;
}

export class LinkRate {
  #perS = 0;
  #measuredMs = 0;
  /** Since when it has been measured alike: no more than `farMore` times from this rate. */
  #since = { ms: 0, perS: 0 };
  #atLeast = 0;
  /** The last transfer of many blocks was a first measurement that does not count yet. */
  #isDoubted = false;

  /**
   * As measured, and the more the longer ago; of what has long been measured alike, where the decode side's engine says how fast blocks
   * come (`ownPerS`), not more than that or than was measured. 0: it has not been what was waited for.
   */
  perS(nowMs: number, ownPerS = 0): number {
    const alikeMs = this.#measuredMs - this.#since.ms;
    const halfOfMs = Math.min(Math.max(alikeMs, halfMs.least), halfMs.most);
    const halves = Math.max(nowMs - this.#measuredMs, 0) / halfOfMs;
    const perS = this.#perS * 2 ** Math.min(halves, mostHalves);
    return ownPerS > 0 && alikeMs >= halfMs.most ? Math.min(perS, Math.max(this.#perS, ownPerS)) : perS;
  }

  /** As the last blocks came, of late; 0: they were never more than a few. */
  get atLeast(): number {
    return this.#atLeast;
  }

  /** `ownPerS`: as the decode side's engine says; 0: it does not. */
  came({ blocks, allBlocks = blocks, lastBlocks, tookS, afterS }: Transfer, nowMs: number, ownPerS = 0): void {
    if (blocks < 1) return;
    const isBottleneck = blocks >= manyBlocks && afterS > Math.max(leastS, bottleneck * tookS);
    // Only what was waited for is measured by all: over a short time reports of others are too coarse for it.
    const seen = (isBottleneck ? Math.max(allBlocks, blocks) : blocks) / Math.max(tookS, leastS);
    if (isBottleneck) {
      const isFirst = this.#perS === 0 && !this.#isDoubted;
      this.#isDoubted = isFirst && seen * farMore < Math.max(ownPerS, this.#atLeast);
      if (this.#isDoubted) return;
      this.#measured(this.#mean(this.#perS, seen), nowMs);
      this.#atLeast = this.#perS; // what it once was is no bound any more
      return;
    }
    if (blocks >= manyBlocks) this.#isDoubted = false;
    // No time at all: it was told late that the last one was ready. Beside a rate that was measured this says nothing.
    const isTimed = afterS > leastS || this.#perS === 0;
    if (lastBlocks >= someBlocks && isTimed)
      this.#atLeast = this.#mean(this.#atLeast, lastBlocks / Math.max(afterS, leastS));
    const least = Math.max(seen, this.#atLeast);
    // What is forgotten stays so: nothing was waited for.
    if (this.#perS > 0 && least >= this.perS(nowMs, ownPerS)) this.#measured(least, nowMs);
  }

  #measured(perS: number, nowMs: number): void {
    this.#perS = perS;
    this.#measuredMs = nowMs;
    if (!areAlike(perS, this.#since.perS)) this.#since = { ms: nowMs, perS };
  }

  #mean(perS: number, seen: number): number {
    return perS === 0 ? seen : perS + (seen - perS) * weight;
  }
}

const areAlike = (one: number, other: number): boolean => Math.max(one, other) <= farMore * Math.min(one, other);
