/** Asks somebody beside what else goes on whether he answers. One question at a time; what came of it waits until it is taken. */
import type { Replayed } from './replay-buffer.ts';

export type Knocked = 'answered' | 'unanswered';

export class Knock {
  readonly #ask: () => AsyncIterable<Replayed>;
  readonly #onCame: () => void;
  #isUnderWay = false;
  #came: Knocked | undefined;

  /** `ask` may throw: nobody answers. `onCame`: there is something to take. */
  constructor(ask: () => AsyncIterable<Replayed>, onCame: () => void) {
    this.#ask = ask;
    this.#onCame = onCame;
  }

  get isUnderWay(): boolean {
    return this.#isUnderWay;
  }

  /** Does nothing while a question is under way. */
  begin(): void {
    if (!this.#isUnderWay) void this.#run();
  }

  /** What came of it, once; undefined: nothing yet. */
  take(): Knocked | undefined {
    const came = this.#came;
    this.#came = undefined;
    return came;
  }

  async #run(): Promise<void> {
    this.#isUnderWay = true;
    let came: Knocked = 'answered';
    try {
      for await (const _ of this.#ask()) break; // whatever it is
    } catch {
      came = 'unanswered';
    }
    this.#isUnderWay = false;
    this.#came = came;
    this.#onCame();
  }
}
