/** Prefix-cache lookups between two readings, in tokens; requests that were preempted are counted apart. */
export interface PrefixCacheStatsSnapshot {
  /** The cache was reset since the last reading. */
  readonly reset: boolean;
  readonly requests: number;
  readonly queriedTokens: number;
  readonly hitTokens: number;
  readonly preemptedRequests: number;
  readonly preemptedQueriedTokens: number;
  readonly preemptedHitTokens: number;
}

export class PrefixCacheStats {
  #reset = false;
  #fresh = { requests: 0, queriedTokens: 0, hitTokens: 0 };
  #preempted = { requests: 0, queriedTokens: 0, hitTokens: 0 };

  recordLookup(queriedTokens: number, hitTokens: number, preempted: boolean): void {
    const counts = preempted ? this.#preempted : this.#fresh;
    counts.requests++;
    counts.queriedTokens += queriedTokens;
    counts.hitTokens += hitTokens;
  }

  recordReset(): void {
    this.take();
    this.#reset = true;
  }

  take(): PrefixCacheStatsSnapshot {
    const taken = {
      reset: this.#reset,
      ...this.#fresh,
      preemptedRequests: this.#preempted.requests,
      preemptedQueriedTokens: this.#preempted.queriedTokens,
      preemptedHitTokens: this.#preempted.hitTokens,
    };
    this.#reset = false;
    this.#fresh = { requests: 0, queriedTokens: 0, hitTokens: 0 };
    this.#preempted = { requests: 0, queriedTokens: 0, hitTokens: 0 };
    return taken;
  }
}

/** Requests that a recent hit ratio is taken over. */
const recentRequests = 1000;

/**
 * The share of tokens that hit, over the last `maxRequests` requests: what a dashboard shows, where totals since the start
 * would hide a change. Preempted requests do not count. After vLLM's CachingMetrics.
 */
export class RecentHits {
  readonly #maxRequests: number;
  /** A ring: queried and hit tokens of each request. */
  readonly #queried: Float64Array;
  readonly #hits: Float64Array;
  #next = 0;
  #count = 0;
  #queriedSum = 0;
  #hitSum = 0;

  constructor(maxRequests = recentRequests) {
    this.#maxRequests = maxRequests;
    this.#queried = new Float64Array(maxRequests);
    this.#hits = new Float64Array(maxRequests);
  }

  /** Requests that the ratio is over. */
  get requests(): number {
    return this.#count;
  }

  /** 0..1; 0 when nothing was asked for. */
  get ratio(): number {
    return this.#queriedSum === 0 ? 0 : this.#hitSum / this.#queriedSum;
  }

  record(queriedTokens: number, hitTokens: number): void {
    const at = this.#next;
    this.#next = (at + 1) % this.#maxRequests;
    this.#queriedSum += queriedTokens - this.#queried[at]!;
    this.#hitSum += hitTokens - this.#hits[at]!;
    this.#queried[at] = queriedTokens;
    this.#hits[at] = hitTokens;
    this.#count = Math.min(this.#count + 1, this.#maxRequests);
  }

  /** The cache was reset: what it hit before says nothing any more. */
  clear(): void {
    this.#queried.fill(0);
    this.#hits.fill(0);
    this.#next = 0;
    this.#count = 0;
    this.#queriedSum = 0;
    this.#hitSum = 0;
  }
}
