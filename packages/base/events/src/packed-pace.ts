/**
 * When packed events go out: at once, or, where others went a moment ago, with all that follow within `gatherMs` as one batch
 * (gathered-events.ts). Invariant: what was added first is published first; who publishes anything else calls `flush` before.
 */
import { GatheredEvents } from './gathered-events.ts';
import type { PackedEvents } from './packed-encoder.ts';

/** Gathered ones go before their time. */
const mostGatheredWords = 1 << 18;

export class PackedPace {
  readonly #gathered = new GatheredEvents();
  readonly #gatherMs: number;
  readonly #publish: (packed: PackedEvents) => void;
  /** When the last batch was made, on performance.now(). */
  #lastMs = Number.NEGATIVE_INFINITY;
  #timer: NodeJS.Timeout | undefined;

  /** `publish` makes a batch of them, and does not use them afterwards. */
  constructor(gatherMs: number, publish: (packed: PackedEvents) => void) {
    this.#gatherMs = gatherMs;
    this.#publish = publish;
  }

  /** `packed` is not used afterwards. */
  add(packed: PackedEvents): void {
    const nowMs = performance.now();
    const waitMs = this.#lastMs + this.#gatherMs - nowMs;
    if (waitMs <= 0 && this.#gathered.count === 0) {
      this.#lastMs = nowMs;
      this.#publish(packed);
      return;
    }
    if (!this.#gathered.takes(packed)) this.flush();
    this.#gathered.add(packed);
    if (waitMs <= 0 || this.#gathered.wordCount > mostGatheredWords) this.flush();
    else this.#timer ??= setTimeout(this.flush, waitMs);
  }

  /** What is gathered goes now. */
  readonly flush = (): void => {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    if (this.#gathered.count === 0) return;
    this.#lastMs = performance.now();
    this.#publish(this.#gathered.take());
  };
}
