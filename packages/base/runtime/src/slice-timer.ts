/**
 * Long work in slices of the event loop: `if (timer.due) await timer.next()` between two steps of it. Invariant: no turn is longer than
 * a slice and one step.
 */
const sliceMs = 5;

export class SliceTimer {
  #sinceMs = performance.now();

  get due(): boolean {
    return performance.now() - this.#sinceMs >= sliceMs;
  }

  /** What else waits has its turn. */
  async next(): Promise<void> {
    await new Promise<void>((resolve) => void setImmediate(resolve));
    this.#sinceMs = performance.now();
  }
}
