/**
 * What was cleared of which source, and when. To clear is O(1): sets that name what is out since stay as they are, and whoever reads them
 * leaves it out. Who writes them anew asks whether anything of them is out at all, which the last clears answer without a look at all sources.
 */

/** At most this many media per source: one bit each. */
export const maxMedia = 8;
const allMedia = (1 << maxMedia) - 1;
/** Clears that are known one by one: as many as are looked through faster than a row of sources. */
const remembered = 256;

export class Clears {
  /** Clears so far. A moment is told by how many there were. */
  count = 0;
  /** source × maxMedia + medium → the last clear that took it. */
  #last = new Float64Array();
  /** Source → the last clear of any of its media. */
  #lastOf = new Float64Array();
  /** Of each of the last ones, source << maxMedia | media. */
  readonly #recent = new Int32Array(remembered);

  /** There is room for so many sources from now on. */
  admit(sources: number): void {
    const [last, lastOf] = [this.#last, this.#lastOf];
    this.#last = new Float64Array(sources * maxMedia);
    this.#last.set(last);
    this.#lastOf = new Float64Array(sources);
    this.#lastOf.set(lastOf);
  }

  /** Of one medium, or of all. */
  add(source: number, medium?: number): void {
    const media = medium === undefined ? allMedia : 1 << medium;
    this.#recent[this.count % remembered] = (source << maxMedia) | media;
    this.count++;
    const first = source * maxMedia;
    if (medium === undefined) this.#last.fill(this.count, first, first + maxMedia);
    else this.#last[first + medium] = this.count;
    this.#lastOf[source] = this.count;
  }

  isOut(holder: number, since: number): boolean {
    return this.#last[holder]! > since;
  }

  /** Of these media of a source, those that were not cleared since. */
  left(source: number, media: number, since: number): number {
    return this.#lastOf[source]! > since ? this.#leftOf(source, media, since) : media;
  }

  #leftOf(source: number, media: number, since: number): number {
    let left = media;
    for (let rest = media; rest !== 0; rest &= rest - 1)
      if (this.#last[source * maxMedia + 31 - Math.clz32(rest & -rest)]! > since) left ^= rest & -rest;
    return left;
  }

  /** Sources or clears that `touches` and `takeOut` look at, at most. */
  looksOf(bits: Uint8Array, since: number): number {
    return this.#remembers(since) ? this.count - since : bits.length;
  }

  /** Whether anything of this row, media of each source, was cleared since. */
  touches(bits: Uint8Array, since: number): boolean {
    if (!this.#remembers(since)) return bits.some((media, source) => this.left(source, media, since) !== media);
    for (let clear = since; clear < this.count; clear++) {
      const recent = this.#recent[clear % remembered]!;
      const source = recent >>> maxMedia;
      if (source < bits.length && (bits[source]! & recent & allMedia) !== 0) return true;
    }
    return false;
  }

  /** Takes it out of a row. */
  takeOut(bits: Uint8Array, since: number): void {
    if (!this.#remembers(since)) {
      for (let source = 0; source < bits.length; source++) bits[source] = this.left(source, bits[source]!, since);
      return;
    }
    for (let clear = since; clear < this.count; clear++) {
      const recent = this.#recent[clear % remembered]!;
      const source = recent >>> maxMedia;
      if (source < bits.length) bits[source]! &= ~(recent & allMedia);
    }
  }

  #remembers(since: number): boolean {
    return this.count - since <= remembered;
  }
}
