/**
 * What the beats of a node's pulse say of it while its frames do not come: whether it has beaten since something was sent, with an
 * event loop that goes round.
 */
import type { NodePulse } from '@kvtier/wire';
import { askAfterMs } from './silence.ts';

export class Beats {
  readonly #nowMs: () => number;
  #beatAtMs = Number.NEGATIVE_INFINITY;
  /** What was read since it was taken last. */
  #stillMs: number | undefined;
  /** null: of a node without one. */
  pulse: NodePulse | null = null;

  constructor(nowMs: () => number) {
    this.#nowMs = nowMs;
  }

  /** Reads the pulse, which tells each beat once. */
  feel(): void {
    const stillMs = this.pulse?.stillMs();
    if (stillMs === undefined) return;
    this.#stillMs = stillMs;
    // A turn of its event loop that has gone on for so long is a standstill for whoever waits.
    if (stillMs < askAfterMs) this.#beatAtMs = this.#nowMs();
  }

  /** Has it beaten since then? Felt at that time, too: what was beaten before is not told as of later. */
  since(ms: number): boolean {
    this.feel();
    return this.#beatAtMs > ms;
  }

  /** As `NodePulse.stillMs`: of the beats since it was taken last. */
  takeStillMs(): number | undefined {
    this.feel();
    const stillMs = this.#stillMs;
    this.#stillMs = undefined;
    return stillMs;
  }
}
