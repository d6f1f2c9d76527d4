/**
 * The bits of each set of holders: a row of bytes, one for each source. Rows of many sets lie in one slab: an array of its own for each
 * would be two objects more that a match waits for.
 *
 * A row is as wide as there are sources, in powers of two: a cluster of eight does not pay for one of a thousand. Where a row lies is
 * apart from its set's number, so that rows move together when they become wider, and when many of them were given back.
 */

/** Of one row at least. */
const slabBytes = 16 * 1024;
/** Rows move together when that leaves at most this share of the slabs. */
const packedShare = 3 / 4;
const nowhere = -1;

export class SetRows {
  #width: number;
  /** Rows of a slab, as a power of two: how far a place is shifted for its slab's. */
  #shift = 0;
  #mask = 0;
  #slabs: Uint8Array[] = [];
  /** Set → which row is its own. */
  readonly #places: number[] = [];
  #freePlaces: number[] = [];
  /** Places that were ever given. */
  #end = 0;

  constructor(width: number) {
    this.#width = width;
    this.#measure();
  }

  /** Sources that a row has room for. */
  get width(): number {
    return this.#width;
  }

  get bytes(): number {
    return this.#slabs.length * (this.#width << this.#shift);
  }

  /** Where the bits of each source lie, by its number, from `firstOf` on. Not to be changed. */
  slabOf(set: number): Uint8Array {
    return this.#slabs[this.#places[set]! >>> this.#shift]!;
  }

  firstOf(set: number): number {
    return (this.#places[set]! & this.#mask) * this.#width;
  }

  /** A view, good until rows are added or move. Not to be changed. */
  of(set: number): Uint8Array {
    const first = this.firstOf(set);
    return this.slabOf(set).subarray(first, first + this.#width);
  }

  /** A set that has no row gets this one. */
  add(set: number, bits: Uint8Array): void {
    const place = this.#freePlaces.pop() ?? this.#end++;
    this.#slabs[place >>> this.#shift] ??= new Uint8Array(this.#width << this.#shift);
    this.#places[set] = place;
    this.slabOf(set).set(bits, this.firstOf(set));
  }

  remove(set: number): void {
    this.#freePlaces.push(this.#places[set]!);
    this.#places[set] = nowhere;
  }

  /** Gives back memory, where there is enough to be given back. O(rows) then. */
  pack(): void {
    const rows = this.#end - this.#freePlaces.length;
    if (Math.ceil(rows / (this.#mask + 1)) <= this.#slabs.length * packedShare) this.#move(this.#width);
  }

  /** Room for more sources, of which no set has any yet. O(rows). */
  widen(width: number): void {
    this.#move(width);
  }

  #measure(): void {
    this.#shift = Math.max(Math.floor(Math.log2(slabBytes / this.#width)), 0);
    this.#mask = (1 << this.#shift) - 1;
  }

  #move(width: number): void {
    const [slabs, shift, mask, before] = [this.#slabs, this.#shift, this.#mask, this.#width];
    this.#width = width;
    this.#measure();
    this.#slabs = [];
    this.#freePlaces = [];
    this.#end = 0;
    for (let set = 0; set < this.#places.length; set++) {
      const place = this.#places[set]!;
      if (place === nowhere) continue;
      const first = (place & mask) * before;
      this.add(set, slabs[place >>> shift]!.subarray(first, first + before));
    }
  }
}
