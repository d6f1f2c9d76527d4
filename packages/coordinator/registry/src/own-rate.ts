/**
 * How fast a pod computes prompts, from requests that had it for themselves: uncached tokens ÷ the time from being sent to the first token.
 *
 * Each says too much or too little for reasons of its own: the index did not know that a part was cached, or believed in what was evicted;
 * somebody else came; the pod compiled something. So the median of the last ones counts, once there are a few; short prompts, which are
 * mostly the way there and back, and what no machine does, are left out.
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

  took(tokens: number, seconds: number): void {
    const rate = tokens / seconds;
    if (!(tokens >= leastTokens && rate >= leastRate && rate <= mostRate)) return;
    this.#rates[this.#at] = rate;
    this.#at = (this.#at + 1) % kept;
    if (this.#rates.length < needed) return;
    const sorted = this.#rates.toSorted((a, b) => a - b);
    this.#median = (sorted[(sorted.length - 1) >>> 1]! + sorted[sorted.length >>> 1]!) / 2;
  }
}

const leastTokens = 256;
const needed = 3;
const kept = 15;
/** Prompt tokens a second of any machine. */
const [leastRate, mostRate] = [1, 10_000_000];
