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
