/** The mean of the last numbers that were seen: what is new counts, and no single one for much. */
const remembered = 256;
/** Fewer tell nothing. */
const fewest = 16;

export class LastMean {
  readonly #last = new Float64Array(remembered);
  #count = 0;
  #sum = 0;

  add(value: number): void {
    const at = this.#count++ % remembered;
    this.#sum += value - this.#last[at]!;
    this.#last[at] = value;
  }

  /** undefined: too few were seen. */
  get mean(): number | undefined {
    return this.#count < fewest ? undefined : this.#sum / Math.min(this.#count, remembered);
  }
}
