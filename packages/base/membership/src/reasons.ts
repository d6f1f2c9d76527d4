/**
 * Which reasons are told why something does not work: the first one at once, and another one, whose remedy is another. Servers that come and
 * go are met in several ways within a second: from one reason to the next there is a pause, twice as long each time.
 */
const firstPauseMs = 5_000;
const maxPauseMs = 300_000;

export class Reasons {
  #told: string | undefined;
  #toldMs = Number.NEGATIVE_INFINITY;
  #pauseMs = firstPauseMs;

  /** Whether this one is to be told now, after which it has been. undefined: there is none any more. */
  isNews(why: string | undefined, nowMs: number): boolean {
    if (why === this.#told) return false;
    const isAnother = why !== undefined && this.#told !== undefined;
    if (isAnother && nowMs - this.#toldMs < this.#pauseMs) return false;
    this.#pauseMs = isAnother ? Math.min(2 * this.#pauseMs, maxPauseMs) : firstPauseMs;
    this.#told = why;
    this.#toldMs = nowMs;
    return true;
  }
}
