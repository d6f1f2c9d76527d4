/**
 * What clients count while a part of their time counts: tokens, and how long each was awaited. What is still awaited at the end is counted
 * as long as it was awaited until then: an answer that stands still would be no time at all, and leave the percentiles better than they are.
 */

/** Milliseconds. */
export interface Percentiles {
  readonly count: number;
  readonly p50: number;
  readonly p90: number;
  readonly p99: number;
  readonly p999: number;
}

/** Of the process' clock (performance.now()). */
interface Window {
  readonly fromMs: number;
  readonly toMs: number;
}

/** Counts by tens of microseconds. */
class Times {
  readonly #counts = new Float64Array(200_000);
  #count = 0;

  add(us: number): void {
    this.#counts[Math.min(Math.max(Math.round(us / 10), 0), this.#counts.length - 1)]!++;
    this.#count++;
  }

  /** Milliseconds. */
  #at(share: number): number {
    let left = this.#count * share;
    for (let i = 0; i < this.#counts.length; i++) {
      left -= this.#counts[i]!;
      if (left <= 0) return i / 100;
    }
    return Number.NaN;
  }

  get told(): Percentiles {
    return { count: this.#count, p50: this.#at(0.5), p90: this.#at(0.9), p99: this.#at(0.99), p999: this.#at(0.999) };
  }
}

export class Counting {
  readonly first = new Times();
  readonly way = new Times();
  readonly gaps = new Times();
  tokens = 0;
  readonly #window: Window;
  readonly #open = new Set<Reader>();
  #skippedUntilMs = 0;

  constructor(window: Window) {
    this.#window = window;
  }

  /** What is awaited until then had to wait for something that we asked for. */
  skipUntil(ms: number): void {
    this.#skippedUntilMs = ms;
  }

  begin(nowMs = performance.now()): Reader {
    const reader = new Reader(this, nowMs);
    this.#open.add(reader);
    return reader;
  }

  /** For readers. */
  token(nowMs: number, awaitedMs: number, isFirst: boolean, wayUs: number): void {
    const { fromMs, toMs } = this.#window;
    if (nowMs < fromMs || nowMs > toMs) return;
    this.tokens++;
    if (nowMs < this.#skippedUntilMs) return;
    (isFirst ? this.first : this.gaps).add(awaitedMs * 1_000);
    this.way.add(wayUs);
  }

  /** For readers: a whole answer, or one that failed. */
  ended(reader: Reader): void {
    this.#open.delete(reader);
  }

  /** When the window is over, once. Gives how many answers had stood still for `stillMs` or longer. */
  end(stillMs: number): number {
    let hanging = 0;
    for (const { sinceMs, tokens } of this.#open) {
      const ageMs = this.#window.toMs - sinceMs;
      if (ageMs < 0) continue; // it went on behind the end
      (tokens === 0 ? this.first : this.gaps).add(ageMs * 1_000);
      if (ageMs >= stillMs) hanging++;
    }
    return hanging;
  }
}

/** One answer's tokens as they come. */
export class Reader {
  readonly #counting: Counting;
  /** Its beginning, or its last token. */
  sinceMs: number;
  tokens = 0;

  constructor(counting: Counting, nowMs: number) {
    this.#counting = counting;
    this.sinceMs = nowMs;
  }

  /** `wayUs`: from its writing to its reading. */
  token(wayUs: number, nowMs = performance.now()): void {
    this.#counting.token(nowMs, nowMs - this.sinceMs, this.tokens === 0, wayUs);
    this.tokens++;
    this.sinceMs = nowMs;
  }

  end(): void {
    this.#counting.ended(this);
  }
}
