/**
 * How much later a publisher's events come than they did at best: the delay itself cannot be known, as clocks differ. Either clock may be
 * set at any time, and both at once where they are one host's. So it is measured twice, by our wall clock and by one that nobody sets, and
 * the smaller one counts: what is late is late by both, and a step of ours, alone or with the publisher's, shows by one of them only.
 */

/** The smallest delay of the last one or two of these stands for no delay. */
const windowS = 60;
/** What is further off is no time. */
const maxOffsetS = 86_400;

export interface Clocks {
  /** Seconds, of a clock that is never set: for what lies between two moments. */
  readonly now: () => number;
  /** Unix time in seconds. */
  readonly wallS: () => number;
}

export class EventDelay {
  readonly #clocks: Clocks;
  #sinceS = Number.NEGATIVE_INFINITY;
  /** By each clock. */
  #least = [Number.POSITIVE_INFINITY, Number.POSITIVE_INFINITY];
  #leastBefore = this.#least;

  constructor(clocks: Clocks) {
    this.#clocks = clocks;
  }

  /** Of what was said at `ts`, by the publisher's clock, and came now, in seconds; undefined: that is no time. */
  of(ts: number): number | undefined {
    const now = this.#clocks.now();
    const offsets = [this.#clocks.wallS() - ts, now - ts];
    if (!(Math.abs(offsets[0]!) < maxOffsetS)) return undefined;
    if (now - this.#sinceS > windowS) {
      this.#sinceS = now;
      this.#leastBefore = this.#least;
      this.#least = offsets;
    } else this.#least = this.#least.map((least, clock) => Math.min(least, offsets[clock]!));
    const delays = offsets.map((offset, clock) => offset - Math.min(this.#least[clock]!, this.#leastBefore[clock]!));
    return Math.max(0, Math.min(...delays));
  }
}
