/**
 * Tells a node that has nothing to say from one that stands still, while requests wait for it:
 *
 *      0                        500 ms                      1,200 ms without a frame
 *      ├────────────────────────┼───────────────────────────┤
 *      a request waits          a sign of life is asked for  it stands still: nothing more is waited for
 *
 * A load of what another engine computes is silent for long, and its node answers at once when it is asked.
 *
 * Time is counted in ticks that did run: on a machine so busy that this process does not get its turn, the node, on the same machine,
 * does not get its own either, and a tick that comes late counts as one. So it is with the node's: where its pulse beats, what is
 * silent is its event loop's present turn, as long as that took of its own, and a node that is slow is waited for.
 */
import type { Timers } from './timers.ts';

const tickMs = 100;
const ticksToAsk = 5;
const ticksToJudge = 12;
/** After so long without a frame a sign of life is asked for, and after so long it stands still. */
export const [askAfterMs, silentAfterMs] = [ticksToAsk * tickMs, ticksToJudge * tickMs];

export interface SilenceListener {
  /** Does anything wait for the node? Without it nobody asks. */
  isWaiting(): boolean;
  /** Ask for a sign of life: any frame is one. */
  ask(): void;
  /** As `NodePulse.stillMs`. */
  stillMs(): number | undefined;
  /** No sign came. Nothing more is asked until `heard`. */
  onSilent(): void;
}

export class SilenceWatch {
  readonly #timers: Timers;
  readonly #listener: SilenceListener;
  #cancel: (() => void) | undefined;
  #ticks = 0;
  #isSilent = false;

  constructor(timers: Timers, listener: SilenceListener) {
    this.#timers = timers;
    this.#listener = listener;
  }

  /** Something waits from now on. */
  begin(): void {
    if (this.#cancel !== undefined || this.#isSilent) return;
    this.#ticks = 0;
    this.#next();
  }

  /** A frame came. */
  heard(): void {
    this.#ticks = 0;
    this.#isSilent = false;
  }

  end(): void {
    this.#cancel?.();
    this.#cancel = undefined;
  }

  #next(): void {
    this.#cancel = this.#timers.after(tickMs, () => {
      // If we were late ourselves, a frame may lie in the socket already: let it in first.
      setImmediate(() => {
        if (this.#cancel !== undefined) this.#tick();
      });
    });
  }

  #tick(): void {
    if (!this.#listener.isWaiting()) {
      this.#cancel = undefined;
      return;
    }
    this.#ticks++;
    const stillMs = this.#listener.stillMs();
    if (stillMs !== undefined) this.#ticks = Math.min(this.#ticks, Math.floor(stillMs / tickMs));
    if (this.#ticks === ticksToAsk) this.#listener.ask();
    if (this.#ticks < ticksToJudge) {
      this.#next();
      return;
    }
    this.#cancel = undefined;
    this.#isSilent = true;
    this.#listener.onSilent();
  }
}
