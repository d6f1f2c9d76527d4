/**
 * How long an answer will be: as the last ones were, on average. What a client allows says little, many allow as much as the model can; by
 * it a worker would seem to have no room for a request that it has room for, or some for one that it has not.
 */

const remembered = 256;
/** Fewer tell nothing. */
const fewest = 16;
/** Tokens, while nothing is known. */
const usual = 1_024;

export class AnswerLengths {
  readonly #tokens = new Float64Array(remembered);
  #count = 0;
  #sum = 0;

  /** An answer was given, to its end, of so many tokens. */
  ended(tokens: number): void {
    const at = this.#count++ % remembered;
    this.#sum += tokens - this.#tokens[at]!;
    this.#tokens[at] = tokens;
  }

  /** Tokens of an answer that may have `most`. */
  expected(most: number): number {
    const known = Math.min(this.#count, remembered);
    return Math.min(most, known < fewest ? usual : Math.ceil(this.#sum / known));
  }
}
