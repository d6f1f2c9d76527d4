/**
 * What copies ahead may cost: so many bytes a second on average, so many copies at once. A copy begins when the bytes of those before it
 * have been paid for: one that is larger than a second's bytes goes, too, and those after it wait for longer. One of which nothing was
 * copied costs nothing.
 */
export interface BudgetOptions {
  /** 0: nothing is copied. */
  readonly bytesPerS: number;
  readonly maxUnderWay: number;
}

export class Budget {
  readonly #options: BudgetOptions;
  #underWay = 0;
  #owedBytes = 0;
  #atMs = 0;
  /** Bytes of all copies that ended, and were worth their price. Only grows. */
  bytes = 0;

  constructor(options: BudgetOptions) {
    this.#options = options;
  }

  get isOff(): boolean {
    return this.#options.bytesPerS <= 0 || this.#options.maxUnderWay <= 0;
  }

  get underWay(): number {
    return this.#underWay;
  }

  mayBegin(nowMs: number): boolean {
    const { bytesPerS, maxUnderWay } = this.#options;
    if (this.isOff) return false;
    this.#owedBytes = Math.max(this.#owedBytes - (Math.max(nowMs - this.#atMs, 0) / 1000) * bytesPerS, 0);
    this.#atMs = Math.max(nowMs, this.#atMs);
    return this.#owedBytes === 0 && this.#underWay < maxUnderWay;
  }

  begun(bytes: number): void {
    this.#underWay++;
    this.#owedBytes += bytes;
  }

  /** One of those that began, of so many bytes. */
  ended(bytes: number): void {
    this.#underWay--;
    this.bytes += bytes;
  }

  /** One of those that began, and nothing was copied. */
  unused(bytes: number): void {
    this.#underWay--;
    this.#owedBytes = Math.max(this.#owedBytes - bytes, 0);
  }
}
