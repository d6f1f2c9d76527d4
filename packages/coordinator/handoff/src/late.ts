/**
 * How much later than predicted things come, in the middle: a step up for each that came later, down for each that came sooner, so that one
 * that was very late counts no more than any other.
 */
export class Late {
  readonly #stepS: number;
  readonly #maxS: number;
  readonly #firstS: number;
  #s: number;

  constructor(firstS: number, maxS: number, stepS = maxS / 200) {
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
    const moved = this.#s + (seenS > predictedS ? this.#stepS : -this.#stepS);
    this.#s = Math.min(Math.max(moved, 0), this.#maxS);
  }

  /** Nothing was learned for a while: what was, is believed less. */
  forget(part: number): void {
    this.#s += (this.#firstS - this.#s) * part;
  }
}
