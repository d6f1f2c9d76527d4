/**
 * When a publisher is asked whether there is more than what came: soon where something is known to be missing, and after a while in which
 * nothing came, as the last batch may be the one that was lost. Pure: time is an argument. So what was lost is known `maxIdleMs` later at most.
 */

/** After so long without a batch; twice as long after each time that there was none. */
export const idleMs = 1_000;
export const maxIdleMs = 5_000;
/** What is missing is asked for at most so often. */
export const probeMs = 500;

export class Probing {
  #heardMs: number;
  #probedMs = Number.NEGATIVE_INFINITY;
  #idleMs = idleMs;

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
  }

  /** A new connection: its subscription may reach the publisher after its first probe did. */
  connected(): void {
    this.#idleMs = probeMs / 2;
  }

  isDue(nowMs: number, isMissing: boolean): boolean {
    if (nowMs - this.#probedMs < probeMs) return false;
    return isMissing || nowMs - Math.max(this.#heardMs, this.#probedMs) >= this.#idleMs;
  }
}
