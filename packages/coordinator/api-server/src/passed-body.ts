/**
 * The bytes of a body that is passed on, for as long as a worker may have to be asked: once its answer goes back, nobody is, and whoever
 * still knows the request holds none of them.
 */
export class PassedBody {
  readonly byteLength: number;
  #bytes: Uint8Array | undefined;

  constructor(bytes: ArrayBuffer) {
    this.byteLength = bytes.byteLength;
    this.#bytes = new Uint8Array(bytes);
  }

  get bytes(): Uint8Array {
    if (this.#bytes === undefined) throw new Error('this body was let go');
    return this.#bytes;
  }

  /** Whether it was held until now. */
  letGo(): boolean {
    const wasHeld = this.#bytes !== undefined;
    this.#bytes = undefined;
    return wasHeld;
  }
}
