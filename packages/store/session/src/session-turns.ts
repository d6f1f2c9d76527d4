/**
 * Shares the event loop among the sessions of a server. What a request costs depends on what it asks about, so that no number
 * of requests bounds a turn: all sessions together are answered for `turnMs` of it, and who is not done waits, in the order in which
 * that was found out.
 *
 *     turn        │ A A A   │ A A A   │ B B C   │ A     │      a session goes on until it is done, the time is over, or its
 *     waiting     │ A B C   │ B C A   │ A       │       │      own bound is reached; then it is behind the others
 */
import type { Clock } from '@kvtier/runtime';

export class SessionTurns {
  readonly #clock: Clock;
  readonly #turnUs: number;
  /** Each once, and found when it is forgotten. */
  readonly #waiting = new Set<() => void>();
  /** When this turn's time is over; undefined: nothing was asked in it yet. */
  #endUs: number | undefined;
  #next: NodeJS.Immediate | undefined;

  constructor(clock: Clock, turnMs: number) {
    this.#clock = clock;
    this.#turnUs = turnMs * 1000;
  }

  /** This turn has time for one more request. */
  get hasTime(): boolean {
    const nowUs = this.#clock.nowUs();
    if (this.#endUs === undefined) {
      this.#endUs = nowUs + this.#turnUs;
      setImmediate(() => {
        this.#endUs = undefined;
      });
    }
    return nowUs < this.#endUs;
  }

  /** `run` is called in a later turn, once. */
  later(run: () => void): void {
    this.#waiting.add(run);
    this.#next ??= setImmediate(this.#turn);
  }

  forget(run: () => void): void {
    this.#waiting.delete(run);
  }

  readonly #turn = (): void => {
    this.#next = undefined;
    for (const run of [...this.#waiting]) {
      if (!this.hasTime) break;
      if (this.#waiting.delete(run)) run(); // if it is not done it is behind the others now
    }
    if (this.#waiting.size > 0) this.#next ??= setImmediate(this.#turn);
  };
}
