/**
 * The bytes that all names of foreign blocks may have together, whoever tells of them: what is taken is given back when it is free. It is a
 * part of the feed's, beside that of the index itself.
 */
export class NamesBudget {
  #maxBytes: number;
  #bytes = 0;
  #giveWay: () => boolean = () => false;

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

  /** Called as long as names need more than there is: what is worth less goes, piece by piece. False: there is nothing more of it. */
  set whenShort(giveWay: () => boolean) {
    this.#giveWay = giveWay;
  }

  /** False: there is no room. */
  take(bytes: number): boolean {
    while (this.#bytes + bytes > this.#maxBytes) if (!this.#giveWay()) return false;
    this.#bytes += bytes;
    return true;
  }

  /** The same, of what nobody else has. */
  takeSpare(bytes: number): boolean {
    if (this.#bytes + bytes > this.#maxBytes) return false;
    this.#bytes += bytes;
    return true;
  }

  give(bytes: number): void {
    this.#bytes -= bytes;
  }

  /** False: more is taken than that. */
  resize(maxBytes: number): boolean {
    while (this.#bytes > maxBytes) if (!this.#giveWay()) return false;
    this.#maxBytes = maxBytes;
    return true;
  }
}

/** Of a budget that others share no more than a part, however much of it is free: what one takes for long is not there for them. */
export class NamesShare {
  readonly #whole: NamesBudget;
  readonly #share: number;
  #bytes = 0;

  constructor(whole: NamesBudget, share: number) {
    this.#whole = whole;
    this.#share = share;
  }

  get maxBytes(): number {
    return Math.floor(this.#whole.maxBytes * this.#share);
  }

  /** False: there is no room. */
  take(bytes: number): boolean {
    if (this.#bytes + bytes > this.maxBytes || !this.#whole.take(bytes)) return false;
    this.#bytes += bytes;
    return true;
  }

  give(bytes: number): void {
    this.#bytes -= bytes;
    this.#whole.give(bytes);
  }
}
