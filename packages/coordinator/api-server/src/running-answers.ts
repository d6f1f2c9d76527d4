/**
 * Answers that are being generated, of all requests: how many at once, and the last sign of life of any. An answer runs until all of it is
 * written: a client that takes what waited for it is a sign of life, too, or slow readers would look like a worker that is stuck.
 *
 * Beside other models one may have half of what these leave free, so that one that is saturated turns away its own requests alone. A single
 * request is let in whatever its answers, where its model has none and there is room.
 */
import { ownBound } from './own-bound.ts';

export interface Progress {
  readonly running: number;
  readonly finished: number;
  /** Since the last sign of life of any answer that gives some; 0 while none runs. */
  readonly silentMs: number;
}

export class RunningAnswers {
  readonly #most: number;
  readonly #changed: (running: number) => void;
  readonly #models: () => number;
  #running = 0;
  /** Of each model that has some. */
  readonly #ofModel = new Map<string, number>();
  /** Of these, those that give signs of life. */
  #telling = 0;
  #finished = 0;
  #lastSignMs = performance.now();

  /** `models`: how many are served; `changed`: called with how many run, whenever that changes. */
  constructor(most: number, models: () => number, changed: (running: number) => void) {
    this.#most = most;
    this.#models = models;
    this.#changed = changed;
  }

  get progress(): Progress {
    const silentMs = this.#telling === 0 ? 0 : Math.round(performance.now() - this.#lastSignMs);
    return { running: this.#running, finished: this.#finished, silentMs };
  }

  /** A token, or a client that reads. @returns when: now */
  signOfLife(): number {
    this.#lastSignMs = performance.now();
    return this.#lastSignMs;
  }

  /**
   * Does `work`, which is so many answers of this model. `tells`: they give signs of life; those that a pod computes need not, its line says how long
   * each may be silent.
   * @throws KvError BUSY where they are too many
   */
  async counted<T>(model: string, count: number, tells: boolean, work: () => Promise<T>): Promise<T> {
    if (this.#running + count > this.#most)
      throw ownBound(`${this.#running} of ${this.#most} answers are being generated already`);
    const its = this.#ofModel.get(model) ?? 0;
    const share = Math.ceil((this.#most - (this.#running - its)) / 2);
    if (its > 0 && its + count > share && this.#models() > 1)
      throw ownBound(
        `${its} of the ${share} answers that model ${model} may have beside others are being generated already`,
      );
    if (tells && this.#telling === 0) this.signOfLife();
    const telling = tells ? count : 0;
    this.#change(model, count, telling);
    try {
      return await work();
    } finally {
      this.#finished += count;
      this.#change(model, -count, -telling);
    }
  }

  #change(model: string, by: number, telling: number): void {
    const its = (this.#ofModel.get(model) ?? 0) + by;
    if (its > 0) this.#ofModel.set(model, its);
    else this.#ofModel.delete(model);
    this.#running += by;
    this.#telling += telling;
    this.#changed(this.#running);
  }
}
