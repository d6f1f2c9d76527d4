/**
 * Which blocks exports hold. A block counts once, however many of them hold it: of a prefix that many requests share, each offers the same
 * blocks, and the pool lacks them once.
 */
export class HeldByExports {
  /** By block; grows with the highest. */
  #holders = new Int32Array(1_024);
  #count = 0;

  get count(): number {
    return this.#count;
  }

  has(block: number): boolean {
    return (this.#holders[block] ?? 0) > 0;
  }

  hold(blocks: readonly number[]): void {
    for (const block of blocks) {
      if (block >= this.#holders.length) this.#grow(block);
      if (this.#holders[block]!++ === 0) this.#count++;
    }
  }

  letGo(blocks: readonly number[]): void {
    for (const block of blocks) if (--this.#holders[block]! === 0) this.#count--;
  }

  #grow(block: number): void {
    const grown = new Int32Array(2 ** Math.ceil(Math.log2(block + 1)));
    grown.set(this.#holders);
    this.#holders = grown;
  }
}
