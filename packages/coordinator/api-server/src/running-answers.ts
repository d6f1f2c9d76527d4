/**
 * Answers that are being generated, of all requests: how many at once, and the last sign of life of any. An answer runs until all of it is
 * written: a client that takes what waited for it is a sign of life, too, or slow readers would look like a worker that is stuck.
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
  #running = 0;
  /** Of these, those that give signs of life. */
  #telling = 0;
  #finished = 0;
  #lastSignMs = performance.now();

  /** `changed`: called with how many run, whenever that changes. */
  constructor(most: number, changed: (running: number) => void) {
    this.#most = most;
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
   * Does `work`, which is so many answers. `tells`: they give signs of life; those that a pod computes need not, its line says how long
   * each may be silent.
   * @throws KvError BUSY where they are too many
   */
  async counted<T>(count: number, tells: boolean, work: () => Promise<T>): Promise<T> {
    if (this.#running + count > this.#most)
      throw ownBound(`${this.#running} of ${this.#most} answers are being generated already`);
    if (tells && this.#telling === 0) this.signOfLife();
    const telling = tells ? count : 0;
    this.#change(count, telling);
    try {
      return await work();
    } finally {
      this.#finished += count;
      this.#change(-count, -telling);
    }
  }

  #change(by: number, telling: number): void {
    this.#running += by;
    this.#telling += telling;
    this.#changed(this.#running);
  }
}
