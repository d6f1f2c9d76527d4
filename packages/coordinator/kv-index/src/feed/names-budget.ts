/**
 * The bytes that all names of foreign blocks may have together, whoever tells of them: what is taken is given back when it is free. It is a
 * part of the feed's, beside that of the index itself.
 */
export class NamesBudget {
  #maxBytes: number;
  #bytes = 0;

  constructor(maxBytes: number) {
    this.#maxBytes = maxBytes;
  }

  get maxBytes(): number {
    return this.#maxBytes;
  }

  /** Taken. */
  get bytes(): number {
    return this.#bytes;
  }

  /** False: there is no room. */
  take(bytes: number): boolean {
    if (this.#bytes + bytes > this.#maxBytes) return false;
    this.#bytes += bytes;
    return true;
  }

  give(bytes: number): void {
    this.#bytes -= bytes;
  }

  /** False: more is taken than that. */
  resize(maxBytes: number): boolean {
    if (this.#bytes > maxBytes) return false;
    this.#maxBytes = maxBytes;
    return true;
  }
}
