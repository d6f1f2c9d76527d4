/**
 * Finds out what has taken too long, by a clock that stands still while this process does: SIGSTOP, the pause of a virtual
 * machine or a long turn of the event loop say nothing about the other end.
 *
 * Invariants: between two readings of the clock at most `longestStepMs` pass on it, so however long a standstill was, it is
 * blamed on nobody; `look` runs after a poll phase, when what arrived during a standstill has been taken in.
 */

export class Watch {
  readonly #longestStepMs: number;
  readonly #timer: NodeJS.Timeout;
  #seenMs = performance.now();
  #lostMs = 0;
  #stopped = false;

  /** `look` is called about every `everyMs` with the time on this clock. Does not keep the process alive. */
  constructor(everyMs: number, look: (nowMs: number) => void) {
    this.#longestStepMs = 2 * everyMs;
    this.#timer = setInterval(() => {
      this.nowMs(); // what has been lost until here is known before anything that arrives is stamped
      setImmediate(() => {
        if (!this.#stopped) look(this.nowMs());
      });
    }, everyMs).unref();
  }

  /** Milliseconds as `performance.now()` counts them, less those in which this process stood still. Stamps are taken with it. */
  nowMs(): number {
    const realMs = performance.now();
    const stepMs = realMs - this.#seenMs;
    if (stepMs > this.#longestStepMs) this.#lostMs += stepMs - this.#longestStepMs;
    this.#seenMs = realMs;
    return realMs - this.#lostMs;
  }

  stop(): void {
    this.#stopped = true;
    clearInterval(this.#timer);
  }
}

/** Looks within a limit: a standstill between two of them costs an eighth of it. */
const looks = 16;

/** As AbortSignal.timeout, by the clock of a `Watch`; `end` when it is not needed any more. */
export function runningTimeout(ms: number): { readonly signal: AbortSignal; end(): void } {
  const cut = new AbortController();
  const watch: Watch = new Watch(ms / looks, (nowMs) => {
    if (nowMs - beganMs < ms) return;
    watch.stop();
    cut.abort(new DOMException('The operation was aborted due to timeout', 'TimeoutError'));
  });
  const beganMs = watch.nowMs();
  return { signal: cut.signal, end: () => watch.stop() };
}
