/**
 * How much later than predicted things come, in the middle, or all but some: a step up for each that came later, down for each that came
 * sooner, so that one that was very late counts no more than any other.
 */
export class Late {
  readonly #stepS: number;
  readonly #maxS: number;
  readonly #firstS: number;
  /** Of those that come, the share that is no later. */
  readonly #share: number;
  #s: number;

  constructor(firstS: number, maxS: number, share = 0.5, stepS = maxS / 200) {
    this.#share = share;
    this.#firstS = firstS;
    this.#s = firstS;
    this.#maxS = maxS;
    this.#stepS = stepS;
  }

  /** Seconds. */
  get s(): number {
    return this.#s;
  }

  /** `predictedS` has `s` in it. */
  came(predictedS: number, seenS: number): void {
    const moved = this.#s + 2 * this.#stepS * (seenS > predictedS ? this.#share : this.#share - 1);
    this.#s = Math.min(Math.max(moved, 0), this.#maxS);
  }

  /** Nothing was learned for a while: what was, is believed less. */
  forget(part: number): void {
    this.#s += (this.#firstS - this.#s) * part;
  }
}
