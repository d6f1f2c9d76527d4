/**
 * How long an answer will be: as the last ones were, on average. What a client allows says little, many allow as much as the model can; by
 * it a worker would seem to have no room for a request that it has room for, or some for one that it has not.
 */
import { LastMean } from './last-mean.ts';

/** Tokens, while nothing is known. */
const usual = 1_024;

export class AnswerLengths {
  readonly #tokens = new LastMean();

  /** An answer was given, to its end, of so many tokens. */
  ended(tokens: number): void {
    this.#tokens.add(tokens);
  }

  /** Tokens of an answer that may have `most`. */
  expected(most: number): number {
    return Math.min(most, Math.ceil(this.#tokens.mean ?? usual));
  }
}
