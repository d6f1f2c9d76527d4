/**
 * Values of a partition that were read and are a newer program's. Each is a miss here: it is not listed, and is not written either, or its
 * entry would be used by every write that finds it held, and never age. As long as the block has that value, and no longer.
 *
 * Invariant: bounded. One that is forgotten is listed again, and read once more.
 */

/** As many as their entries took in the index, which has them no more: some 200 bytes each. */
const maxValues = 1 << 16;

export class ForeignValues {
  /** By namespace and hash: the entry. The oldest first. */
  readonly #entries = new Map<string, string>();
  readonly #max: number;

  constructor(max: number = maxValues) {
    this.#max = max;
  }

  add(name: string, entry: string): void {
    this.#entries.delete(name);
    if (this.#entries.size >= this.#max) this.#entries.delete(this.#entries.keys().next().value!);
    this.#entries.set(name, entry);
  }

  /** `entry`: undefined: whichever the block has. */
  has(name: string, entry?: string): boolean {
    const known = this.#entries.get(name);
    return known !== undefined && (entry === undefined || known === entry);
  }

  /** The block has another value than it had (`entry`, if that is known), or none. */
  forget(name: string, entry?: string): void {
    if (this.has(name, entry)) this.#entries.delete(name);
  }

  clear(): void {
    this.#entries.clear();
  }
}
