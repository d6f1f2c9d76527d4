/** A clock that a test moves. */
import { setImmediate as turn } from 'node:timers/promises';
import type { Timers } from '../timers.ts';

export class ManualTimers implements Timers {
  #nowMs = 0;
  readonly #timers = new Set<{ readonly atMs: number; readonly run: () => void }>();

  nowMs(): number {
    return this.#nowMs;
  }

  after(ms: number, run: () => void): () => void {
    const timer = { atMs: this.#nowMs + ms, run };
    this.#timers.add(timer);
    return () => this.#timers.delete(timer);
  }

  /** All that is due until then, in order; what was late to be let in had its turn before the next. */
  async pass(ms: number): Promise<void> {
    const endMs = this.#nowMs + ms;
    for (;;) {
      const [next] = [...this.#timers].filter(({ atMs }) => atMs <= endMs).sort((a, b) => a.atMs - b.atMs);
      if (next === undefined) break;
      this.#nowMs = Math.max(this.#nowMs, next.atMs);
      this.#timers.delete(next);
      next.run();
      await turn();
    }
    this.#nowMs = endMs;
  }

  /** All that is due by then at once, as in a process that had no turn meanwhile. */
  async oversleep(ms: number): Promise<void> {
    this.#nowMs += ms;
    await this.pass(0);
  }
}
