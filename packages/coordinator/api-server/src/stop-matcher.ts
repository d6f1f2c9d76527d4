/**
 * Finds stop strings in text that arrives in pieces cut anywhere.
 *
 * Invariant: what was emitted never holds a part of a stop string that completed later: the longest suffix that may
 * still become one is held back. The match that ends first wins (of those the one that starts first), so the result
 * does not depend on how the text was cut.
 */
export interface Matched {
  /** Text that is safe to show. */
  readonly text: string;
  /** A stop string completed: the text ends before it. */
  readonly stopped: boolean;
}

export class StopMatcher {
  readonly #stops: readonly string[];
  readonly #longestChars: number;
  #held = '';

  /** `stops`: non-empty strings. */
  constructor(stops: readonly string[]) {
    this.#stops = stops;
    this.#longestChars = Math.max(0, ...stops.map((stop) => stop.length));
  }

  push(piece: string): Matched {
    if (this.#stops.length === 0) return { text: piece, stopped: false };
    const text = this.#held + piece;
    let start = -1;
    let end = Number.POSITIVE_INFINITY;
    for (const stop of this.#stops) {
      const at = text.indexOf(stop);
      if (at === -1) continue;
      const stopEnd = at + stop.length;
      if (stopEnd < end || (stopEnd === end && at < start)) {
        start = at;
        end = stopEnd;
      }
    }
    if (start !== -1) {
      this.#held = '';
      return { text: text.slice(0, start), stopped: true };
    }
    const keepFrom = this.#firstPossibleStart(text);
    this.#held = text.slice(keepFrom);
    return { text: text.slice(0, keepFrom), stopped: false };
  }

  /** What was held back, now that no more text will come. */
  flush(): string {
    const text = this.#held;
    this.#held = '';
    return text;
  }

  #firstPossibleStart(text: string): number {
    for (let start = Math.max(0, text.length - this.#longestChars + 1); start < text.length; start++) {
      const tail = text.slice(start);
      if (this.#stops.some((stop) => stop.startsWith(tail))) return start;
    }
    return text.length;
  }
}
