/** A set of slot numbers below a bound, a byte each: a million of them are compared with another million in a millisecond. */
export class SlotSet {
  readonly #in: Uint8Array;
  #size = 0;

  constructor(bound: number) {
    this.#in = new Uint8Array(bound);
  }

  get size(): number {
    return this.#size;
  }

  has(slot: number): boolean {
    return this.#in[slot] === 1;
  }

  /** One beyond the bound is in no set. */
  add(slot: number): void {
    if (this.#in[slot] !== 0) return;
    this.#in[slot] = 1;
    this.#size++;
  }

  delete(slot: number): void {
    if (this.#in[slot] !== 1) return;
    this.#in[slot] = 0;
    this.#size--;
  }

  /** Upwards; what is added or deleted meanwhile may be met or not. */
  *[Symbol.iterator](): Generator<number> {
    for (let slot = this.#in.indexOf(1); slot !== -1; slot = this.#in.indexOf(1, slot + 1)) yield slot;
  }

  /** Those in both or in neither. The sets have one bound. */
  *alike(other: SlotSet): Generator<number> {
    const [ours, theirs] = [this.#in, other.#in];
    for (let slot = 0; slot < ours.length; slot++) if (ours[slot] === theirs[slot]) yield slot;
  }
}
