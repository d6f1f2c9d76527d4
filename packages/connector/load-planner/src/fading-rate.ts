/** A rate that follows the present: older samples fade by `keep` at each new one, larger samples weigh more. */
export class FadingRate {
  readonly #keep: number;
  #units = 0;
  #us = 0;

  constructor(keep: number) {
    this.#keep = keep;
  }

  observe(units: number, us: number): void {
    if (!(units > 0) || !(us >= 0) || !Number.isFinite(units + us)) return;
    this.#units = this.#units * this.#keep + units;
    this.#us = this.#us * this.#keep + us;
  }

  /** What was seen so far counts for this share of what it did. */
  fade(share: number): void {
    this.#units *= share;
    this.#us *= share;
  }

  /** Microseconds per unit; undefined before the first sample. */
  get usPerUnit(): number | undefined {
    return this.#units > 0 ? this.#us / this.#units : undefined;
  }
}
