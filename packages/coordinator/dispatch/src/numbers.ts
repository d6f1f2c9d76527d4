/** A set of workers by their numbers, a bit each: whether two have one in common is asked of thousands of requests in one turn. */
export class Numbers {
  #words = new Uint32Array(1);

  set(number: number, isIn: boolean): void {
    const at = number >>> 5;
    if (at >= this.#words.length) {
      if (!isIn) return;
      const words = new Uint32Array(Math.max(at + 1, 2 * this.#words.length));
      words.set(this.#words);
      this.#words = words;
    }
    if (isIn) this.#words[at]! |= 1 << (number & 31);
    else this.#words[at]! &= ~(1 << (number & 31));
  }

  has(number: number): boolean {
    return ((this.#words[number >>> 5] ?? 0) & (1 << (number & 31))) !== 0;
  }

  get isEmpty(): boolean {
    return this.#words.every((word) => word === 0);
  }

  /** Some number is in both. */
  meets(other: Numbers): boolean {
    const words = Math.min(this.#words.length, other.#words.length);
    for (let i = 0; i < words; i++) if ((this.#words[i]! & other.#words[i]!) !== 0) return true;
    return false;
  }

  /** Some number is in this one and not in the other. */
  exceeds(other: Numbers): boolean {
    for (let i = 0; i < this.#words.length; i++) if ((this.#words[i]! & ~(other.#words[i] ?? 0)) !== 0) return true;
    return false;
  }

  /** The same numbers as in the other one from now on. */
  copy(other: Numbers): void {
    if (this.#words.length === other.#words.length) this.#words.set(other.#words);
    else this.#words = other.#words.slice();
  }

  clear(): void {
    this.#words.fill(0);
  }
}
