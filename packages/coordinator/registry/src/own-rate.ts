/**
 * How fast a pod computes prompts, from what its metrics say between two scrapes, or from requests that had it for themselves: uncached
 * tokens ÷ the time from being sent to the first token.
 *
 * Each says too much or too little for reasons of its own: the index did not know that a part was cached, or believed in what was evicted;
 * somebody else came; the pod compiled something, or stood still. So the median of the last ones counts, once there are a few; short
 * prompts, which are mostly the way there and back or a step's own time, and what no machine does, are left out.
 */
export class OwnRate {
  /** Of the last requests; a ring. */
  readonly #rates: number[] = [];
  #at = 0;
  #median = 0;

  /** 0: not known yet. */
  get tokensPerS(): number {
    return this.#median;
  }

  /** `prompts`: of how many the tokens are. Returns whether it counts. */
  took(tokens: number, seconds: number, prompts = 1): boolean {
    const rate = tokens / seconds;
    if (!(tokens >= leastTokens * prompts && rate >= leastRate && rate <= mostRate)) return false;
    this.#rates[this.#at] = rate;
    this.#at = (this.#at + 1) % kept;
    if (this.#rates.length < needed) return true;
    const sorted = this.#rates.toSorted((a, b) => a - b);
    this.#median = (sorted[(sorted.length - 1) >>> 1]! + sorted[sorted.length >>> 1]!) / 2;
    return true;
  }
}

const leastTokens = 256;
const needed = 3;
const kept = 15;
/** Prompt tokens a second of any machine. */
const [leastRate, mostRate] = [1, 10_000_000];
