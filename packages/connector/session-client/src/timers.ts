/** Time as an argument, so that tests decide when a deadline passes. */

export interface Timers {
  /** Monotonic milliseconds, with fractions. */
  nowMs(): number;
  /** Run once, `ms` from now. Returns how to call it off. A pending timer does not keep the process alive. */
  after(ms: number, run: () => void): () => void;
}

export const realTimers: Timers = {
  nowMs: () => performance.now(),
  after: (ms, run) => {
    const timer = setTimeout(run, ms).unref();
    return () => clearTimeout(timer);
  },
};
