/** Bytes of bodies that all streams together hold while they wait to be read: never above `maxBytes`. */
export class HeldBytes {
  readonly #maxBytes: number;
  readonly #onChange: (bytes: number) => void;
  #bytes = 0;

  constructor(maxBytes: number, onChange: (bytes: number) => void) {
    this.#maxBytes = maxBytes;
    this.#onChange = onChange;
  }

  /** Whether there is room. */
  take(bytes: number): boolean {
    if (this.#bytes + bytes > this.#maxBytes) return false;
    this.#bytes += bytes;
    this.#onChange(this.#bytes);
    return true;
  }

  give(bytes: number): void {
    if (bytes === 0) return;
    this.#bytes -= bytes;
    this.#onChange(this.#bytes);
  }
}
