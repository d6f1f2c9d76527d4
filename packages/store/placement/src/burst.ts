/**
 * When a tier's write-down may begin. A prompt that is being computed commits its blocks in bursts, step by step, on the
 * processors that its computation needs; written down when the burst is over, they cost that request nothing (law 2), and
 * go in fewer, larger batches.
 *
 *     commits   | | | |          | | | | | | | | | | | |
 *     writing           ▆▆▆▆                 ▆▆▆▆▆▆▆▆▆▆▆▆
 *                settleMs └ after the last   └ at the latest `maxHolds` x settleMs after the first, or when `heldBytes` wait
 */
import type { Clock } from '@kvtier/runtime';

/** A stream of commits without a pause is held back this many times `settleMs`. */
const maxHolds = 8;

export interface BurstOptions {
  /** 0: nothing is ever held back. */
  readonly settleMs: number;
  /** When so many bytes wait, the burst counts as over. */
  readonly heldBytes: number;
  readonly clock: Clock;
  /** The burst is over. */
  readonly onOver: () => void;
}

export class Burst {
  readonly #options: BurstOptions;
  #firstUs = 0;
  #lastUs = 0;
  #isOver = true;
  #cancelTimer: (() => void) | undefined;

  constructor(options: BurstOptions) {
    this.#options = options;
  }

  /** Something was queued; `first`: nothing waited before it. */
  queued(first: boolean): void {
    if (this.#options.settleMs === 0) return;
    this.#lastUs = this.#options.clock.nowUs();
    if (!first) return;
    this.#firstUs = this.#lastUs;
    this.#isOver = false;
  }

  /** Whether what waits, `bytes`, is to wait on; then `onOver` will be called. */
  holds(bytes: number): boolean {
    if (this.#isOver) return false;
    const { settleMs, heldBytes, clock, onOver } = this.#options;
    const endUs = Math.min(this.#lastUs + settleMs * 1000, this.#firstUs + maxHolds * settleMs * 1000);
    const leftUs = endUs - clock.nowUs();
    if (leftUs <= 0 || bytes >= heldBytes) {
      this.end();
      return false;
    }
    this.#cancelTimer ??= clock.after(Math.ceil(leftUs / 1000), () => {
      this.#cancelTimer = undefined;
      onOver();
    });
    return true;
  }

  /** Whatever waits may go. */
  end(): void {
    this.#isOver = true;
    this.#cancelTimer?.();
    this.#cancelTimer = undefined;
  }
}
