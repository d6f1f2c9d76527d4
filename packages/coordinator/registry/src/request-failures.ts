/**
 * Requests that fail at a pod one after another. Whoever answers a failure at once looks idle, and is chosen before the others: so after
 * `mostInRow` without one that succeeds it rests, twice as long each time; after a rest it gets one request first, and more once
 * that has succeeded. One that its request made fail, at whichever pod, is no reason: a pod rests only while another one of its model may
 * take its place (`maySpare`).
 */

const mostInRow = 3;
const [firstRestMs, mostRestMs] = [1_000, 30_000];

export class RequestFailures {
  #inRow = 0;
  #restMs = 0;
  /** Until then it rests; 0: it does not. */
  #untilMs = 0;
  /** One request was sent after its rest. */
  #isTried = false;

  /** Of those that came last, without one that succeeded. */
  get inRow(): number {
    return this.#inRow;
  }

  isResting(nowMs: number): boolean {
    return nowMs < this.#untilMs;
  }

  /** For how long it gets nothing from now on; 0: no change. */
  failed(nowMs: number, maySpare: () => boolean): number {
    this.#inRow++;
    // Those that had been sent before it rested say nothing new.
    const isOld = this.isResting(nowMs) && !this.#isTried;
    if (this.#inRow < mostInRow || isOld || !maySpare()) return 0;
    this.#isTried = false;
    return this.#rest(nowMs, this.#restMs === 0 ? firstRestMs : Math.min(2 * this.#restMs, mostRestMs));
  }

  /** A request goes there. As `failed`: others wait for what becomes of the first one after a rest, or for as long as that was. */
  sent(nowMs: number, maySpare: () => boolean): number {
    if (this.#restMs === 0 || this.isResting(nowMs) || !maySpare()) return 0;
    this.#isTried = true;
    return this.#rest(nowMs, this.#restMs);
  }

  /** It is needed before its rest is over. */
  woken(): void {
    this.#untilMs = 0;
  }

  succeeded(): void {
    this.#inRow = 0;
    this.#restMs = 0;
    this.#untilMs = 0;
    this.#isTried = false;
  }

  #rest(nowMs: number, ms: number): number {
    this.#restMs = ms;
    this.#untilMs = nowMs + ms;
    return ms;
  }
}
