/**
 * One request's part of a worker's load, from the choice to its end, whatever order a gateway tells things in: the first token is told
 * once and never after the end, and the end exactly once.
 */
import type { Choice } from '@kvtier/dispatch';

export class Share {
  readonly #choice: Choice;
  #told = false;
  #ended = false;

  constructor(choice: Choice) {
    this.#choice = choice;
  }

  firstToken(): void {
    if (this.#told || this.#ended) return;
    this.#told = true;
    this.#choice.firstToken();
  }

  ended(): void {
    if (this.#ended) return;
    this.#ended = true;
    this.#choice.ended();
  }
}
