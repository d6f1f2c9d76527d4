/** Time as an argument: a simulation and tests have their own. */

export interface Clock {
  /** Monotonic microseconds. */
  nowUs(): number;
  /** Unix time in milliseconds: of what is written into objects, and nothing else. It may be put right at any time. */
  wallMs(): number;
  /** Runs `fn` once after `ms`; the returned function cancels it. */
  after(ms: number, fn: () => void): () => void;
}

/** Corrections up to this are followed at once: clocks drift. */
const driftMs = 1_000;
/** A clock that was set is believed when it has stayed so for this long. */
const believedAfterMs = 10_000;

/**
 * Unix time that does not jump with the system's clock: somebody who sets it by days for a moment would give every object of
 * that moment a wrong end. What stays is believed after ten seconds (a clock that is put right after boot).
 */
export class SteadyWall {
  readonly #wallMs: () => number;
  readonly #steadyMs: () => number;
  /** Unix time at 0 of the steady clock: as believed, and as another one says since `#sinceMs`. */
  #offsetMs: number;
  #otherMs: number;
  #sinceMs = 0;

  constructor(wallMs: () => number = () => Date.now(), steadyMs: () => number = () => performance.now()) {
    this.#wallMs = wallMs;
    this.#steadyMs = steadyMs;
    this.#offsetMs = wallMs() - steadyMs();
    this.#otherMs = this.#offsetMs;
  }

  /** Milliseconds. */
  nowMs(): number {
    const steady = this.#steadyMs();
    const offset = this.#wallMs() - steady;
    if (Math.abs(offset - this.#offsetMs) <= driftMs) {
      this.#offsetMs = offset;
      this.#otherMs = offset;
    } else if (Math.abs(offset - this.#otherMs) > driftMs) {
      this.#otherMs = offset;
      this.#sinceMs = steady;
    } else if (steady - this.#sinceMs >= believedAfterMs) this.#offsetMs = offset;
    return this.#offsetMs + steady;
  }
}

/** The process's clock; its wall clock is steady from now on. */
export function createSystemClock(): Clock {
  const wall = new SteadyWall();
  return {
    nowUs: () => performance.now() * 1000,
    wallMs: () => wall.nowMs(),
    after: (ms, fn) => {
      const timer = setTimeout(fn, ms);
      return () => clearTimeout(timer);
    },
  };
}

export const systemClock: Clock = createSystemClock();
