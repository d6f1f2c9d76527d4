/**
 * One request's part of a worker's load, from the choice to its end, whatever order a gateway tells things in: the first token is told
 * once and never after the end, and the end exactly once.
 */
import type { Choice } from '@kvtier/dispatch';

export class Share {
  readonly #choice: Choice;
  /** The pod that computes its prompt: until the first token comes. */
  readonly #prefill: Choice | undefined;
  #told = false;
  #ended = false;

  constructor(choice: Choice, prefill?: Choice) {
    this.#choice = choice;
    this.#prefill = prefill;
  }

  /** `isTimed` as of `Choice`. */
  firstToken(isTimed = false): void {
    if (this.#told || this.#ended) return;
    this.#told = true;
    if (this.#prefill === undefined) this.#choice.firstToken(isTimed);
    else this.#prefill.ended();
  }

  /** `answerTokens` as of `Choice`. */
  ended(answerTokens?: number): void {
    if (this.#ended) return;
    this.#ended = true;
    if (!this.#told) this.#prefill?.ended();
    this.#choice.ended(answerTokens);
  }
}
