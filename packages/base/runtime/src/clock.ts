/** Time as an argument: a simulation and tests have their own. */

export interface Clock {
  /** Monotonic microseconds. */
  nowUs(): number;
  /** Unix time in milliseconds: of what is written into objects, and nothing else. It may be put right at any time. */
  wallMs(): number;
  /** Runs `fn` once after `ms`; the returned function cancels it. */
  after(ms: number, fn: () => void): () => void;
}

export const systemClock: Clock = {
  nowUs: () => performance.now() * 1000,
  wallMs: () => Date.now(),
  after: (ms, fn) => {
    const timer = setTimeout(fn, ms);
    return () => clearTimeout(timer);
  },
};
