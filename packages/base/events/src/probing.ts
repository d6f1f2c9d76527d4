/**
 * When a publisher is asked whether there is more than what came: soon where something is known to be missing, and after a while in which
 * nothing came, as the last batch may be the one that was lost. Pure: time is an argument. So what was lost is known `maxIdleMs` later at most,
 * of a publisher that answers; one that does not is asked ever more rarely.
 */

/** After so long without a batch; twice as long after each time that there was none. */
export const idleMs = 1_000;
export const maxIdleMs = 5_000;
/** What is missing is asked for at most so often. */
export const probeMs = 500;
/** After it did not answer; twice as long after each time. */
export const unansweredMs = 1_000;
export const maxUnansweredMs = 60_000;

export class Probing {
  #heardMs: number;
  #probedMs = Number.NEGATIVE_INFINITY;
  #idleMs = idleMs;
  #pauseMs = probeMs;

  constructor(nowMs: number) {
    this.#heardMs = nowMs;
  }

  heard(nowMs: number): void {
    this.#heardMs = nowMs;
    this.#idleMs = idleMs;
  }

  /** It was asked, and said something new or not. */
  probed(nowMs: number, isNew: boolean): void {
    this.#probedMs = nowMs;
    this.#idleMs = isNew ? idleMs : Math.min(this.#idleMs * 2, maxIdleMs);
    this.#pauseMs = probeMs;
  }

  /** It was asked, and did not answer. */
  unanswered(nowMs: number): void {
    this.#probedMs = nowMs;
    this.#pauseMs = Math.min(Math.max(2 * this.#pauseMs, unansweredMs), maxUnansweredMs);
  }

  /** A new connection: its subscription may reach the publisher after its first probe did. */
  connected(): void {
    this.#idleMs = probeMs / 2;
    this.#pauseMs = probeMs;
  }

  isDue(nowMs: number, isMissing: boolean): boolean {
    if (nowMs - this.#probedMs < this.#pauseMs) return false;
    return isMissing || nowMs - Math.max(this.#heardMs, this.#probedMs) >= this.#idleMs;
  }
}
