/**
 * The tokenizers that a text thread keeps: of all models, as long as its heap holds them; then those that were used last.
 *
 * Invariant: as they count themselves (`heldBytes`), they take no more than `maxBytes`, but for one that is larger by itself.
 */

/** Of a thread's heap; the rest is for bodies, and for reading another tokenizer. */
const heapShare = 2 / 3;

export const keptBytesOf = (heapMiB: number): number => Math.floor(heapMiB * heapShare * 2 ** 20);

export class KeptTokenizers<T extends { readonly heldBytes: number }> {
  readonly #maxBytes: number;
  /** By the number of their load, the one used last at the end. */
  readonly #kept = new Map<number, T>();
  #bytes = 0;
  #hasDropped = false;

  constructor(maxBytes: number) {
    this.#maxBytes = maxBytes;
  }

  /** That of this load, read by `load` if it is not there; `onReread` is told then, if some had to go for want of room before. */
  get(generation: number, load: () => T, onReread: () => void): T {
    let tokenizer = this.#kept.get(generation);
    if (tokenizer === undefined) {
      tokenizer = load();
      this.#bytes += tokenizer.heldBytes;
      if (this.#hasDropped) onReread();
    }
    this.#kept.delete(generation);
    this.#kept.set(generation, tokenizer);
    for (const [oldest, { heldBytes }] of this.#kept) {
      if (this.#bytes <= this.#maxBytes || oldest === generation) break;
      this.#kept.delete(oldest);
      this.#bytes -= heldBytes;
      this.#hasDropped = true;
    }
    return tokenizer;
  }
}
