/**
 * The bits of each set of holders: a row of bytes, one for each source. Rows of many sets lie in one slab: an array of its own for each
 * would be two objects more that a match waits for.
 *
 * A row is as wide as the last of its sources needs, in powers of two: a cluster of eight does not pay for one of a thousand, and who comes
 * makes no row of others wider. Rows of one width lie together. Where a row lies is apart from its set's number, so that rows move together
 * when many of them were given back: the last one to a free place, and so on, one at a time.
 */

/** Of one row at least. */
const slabBytes = 16 * 1024;
/** Rows move together while they would fill at most this share of the slabs. */
const packedShare = 3 / 4;
const nowhere = -1;
/** Of a place, for its row's width: 64 times a power of two, 4,096 at most. */
const widthBits = 3;
const widthMask = (1 << widthBits) - 1;

/** Rows of one width. */
class Slabs {
  readonly width: number;
  /** Rows of a slab, as a power of two: how far a place is shifted for its slab's. */
  readonly shift: number;
  readonly mask: number;
  readonly slabs: Uint8Array[] = [];
  /** Some may be beyond the last place since rows moved together; then no other row lies beyond it. */
  readonly #freePlaces: number[] = [];
  /** Place → the set whose row lies there. */
  readonly #sets: number[] = [];
  rows = 0;

  constructor(width: number) {
    this.width = width;
    this.shift = Math.max(Math.floor(Math.log2(slabBytes / width)), 0);
    this.mask = (1 << this.shift) - 1;
  }

  get bytes(): number {
    return this.slabs.length * (this.width << this.shift);
  }

  get isSparse(): boolean {
    return this.slabs.length > 0 && Math.ceil(this.rows / (this.mask + 1)) <= this.slabs.length * packedShare;
  }

  firstOf(place: number): number {
    return (place & this.mask) * this.width;
  }

  of(place: number): Uint8Array {
    const first = this.firstOf(place);
    return this.slabs[place >>> this.shift]!.subarray(first, first + this.width);
  }

  add(set: number, bits: Uint8Array): number {
    let place = this.#freePlaces.pop();
    while (place !== undefined && place >= this.#sets.length) place = this.#freePlaces.pop();
    place ??= this.#sets.length;
    this.slabs[place >>> this.shift] ??= new Uint8Array(this.width << this.shift);
    this.of(place).set(bits);
    this.#sets[place] = set;
    this.rows++;
    return place;
  }

  remove(place: number): void {
    this.#sets[place] = nowhere;
    this.#freePlaces.push(place);
    this.rows--;
  }

  /** One place less, where there are free ones. Returns whose row was there and where it is now; undefined: nobody's. */
  shrink(): { readonly set: number; readonly place: number } | undefined {
    const set = this.#sets.pop()!;
    const last = this.#sets.length;
    const bits = this.of(last);
    if ((last & this.mask) === 0) this.slabs.pop();
    if (set === nowhere) return undefined;
    this.rows--;
    return { set, place: this.add(set, bits) };
  }
}

export class SetRows {
  readonly #maxWidth: number;
  /** The narrowest first, each twice as wide as the one before. */
  readonly #byWidth: Slabs[];
  /** Set → its row's place among those of its width, and the number of this width. */
  readonly #places: number[] = [];

  constructor(minWidth: number, maxWidth: number) {
    this.#maxWidth = maxWidth;
    this.#byWidth = [new Slabs(Math.min(minWidth, maxWidth))];
  }

  get bytes(): number {
    return this.#byWidth.reduce((sum, { bytes }) => sum + bytes, 0);
  }

  /** Of the rows that there are, without the room beside them. */
  get rowBytes(): number {
    return this.#byWidth.reduce((sum, { rows, width }) => sum + rows * width, 0);
  }

  /** Sources below this have a place in a row for so many. */
  widthFor(sources: number): number {
    let { width } = this.#byWidth[0]!;
    while (width < sources) width = Math.min(2 * width, this.#maxWidth);
    return width;
  }

  /** Sources that a set's row has a place for; it has none of the others. */
  widthOf(set: number): number {
    return this.#slabsOf(set).width;
  }

  /** Where the bits of each source below its width lie, by its number, from `firstOf` on. Not to be changed. */
  slabOf(set: number): Uint8Array {
    const { slabs, shift } = this.#slabsOf(set);
    return slabs[this.#placeOf(set) >>> shift]!;
  }

  firstOf(set: number): number {
    return this.#slabsOf(set).firstOf(this.#placeOf(set));
  }

  /** A view, good until rows move. Not to be changed. */
  of(set: number): Uint8Array {
    return this.#slabsOf(set).of(this.#placeOf(set));
  }

  /** A set that has no row gets this one, which is as wide as `widthFor` says. */
  add(set: number, bits: Uint8Array): void {
    let number = this.#byWidth.findIndex(({ width }) => width >= bits.length);
    if (number === -1) number = this.#widenTo(bits.length);
    this.#places[set] = (this.#byWidth[number]!.add(set, bits) << widthBits) | number;
  }

  remove(set: number): void {
    this.#slabsOf(set).remove(this.#placeOf(set));
    this.#places[set] = nowhere;
  }

  /** Moves a row, where that helps to give back memory. False: there is not enough to be given back. */
  pack(): boolean {
    const number = this.#byWidth.findIndex(({ isSparse }) => isSparse);
    if (number === -1) return false;
    const moved = this.#byWidth[number]!.shrink();
    if (moved !== undefined) this.#places[moved.set] = (moved.place << widthBits) | number;
    return true;
  }

  /** The number of this width, which has had no row so far. */
  #widenTo(width: number): number {
    const { length } = this.#byWidth;
    const last = this.#byWidth[length - 1]!.width;
    if (last >= width) return length - 1;
    this.#byWidth.push(new Slabs(Math.min(2 * last, this.#maxWidth)));
    return this.#widenTo(width);
  }

  #slabsOf(set: number): Slabs {
    return this.#byWidth[this.#places[set]! & widthMask]!;
  }

  #placeOf(set: number): number {
    return this.#places[set]! >>> widthBits;
  }
}
