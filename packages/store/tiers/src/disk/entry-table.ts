/**
 * The rows of the disk tier's index, packed: 64 bytes a block in chunks of typed arrays, outside of V8's heap.
 *
 *     words  0–7 hash · 8 namespace · 9 segment · 10 page · 11 pages · 12 lastUse, low · 13 lastUse, high · 14 next · 15 flags
 *
 * Beside them an open-addressing table of row numbers (linear probing, at most three quarters full, removal by shifting
 * back). Invariant: exactly the rows that are `listed` are found by name. A row that is no longer listed keeps its number
 * until its segment gives all of its rows back, so that an I/O in flight may still ask about it.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';

/** A row's number; -1 (`noEntry`): there is none. */
export type EntryNumber = number;
export const noEntry = -1;

const words = 16;
const chunkShift = 12;
const chunkMask = (1 << chunkShift) - 1;
const field = { namespace: 8, segment: 9, page: 10, pages: 11, useLow: 12, useHigh: 13, next: 14, flags: 15 } as const;
const listedFlag = 1;
/** Used since it was written: worth carrying over when its segment goes. */
const hotFlag = 2;
const hashBytesShift = 8;
const leastSlots = 1024;

export class EntryTable {
  readonly #chunks: Uint32Array[] = [];
  /** Ends of the rows of each chunk (`Header.expiresS`); for chunks in which any row has one. */
  readonly #ends: (Uint32Array | undefined)[] = [];
  #rowCount = 0;
  /** Head of the list of rows that may be used again, through `next`. */
  #free = noEntry;
  #slots = new Int32Array(leastSlots).fill(noEntry);
  /** The name that is looked for. */
  readonly #wanted = new Uint32Array(8);
  #wantedBytes = 0;
  /** Rows that are listed. */
  count = 0;

  /** Rows that were ever used, listed or not. */
  get rowCount(): number {
    return this.#rowCount;
  }

  /** Bytes of memory that the table takes. */
  get bytes(): number {
    const endBytes = this.#ends.reduce((sum, ends) => sum + (ends?.byteLength ?? 0), 0);
    return this.#chunks.length * words * 4 * (chunkMask + 1) + this.#slots.byteLength + endBytes;
  }

  find(namespace: number, hash: HashKey): EntryNumber {
    this.#want(hash);
    return this.#slots[this.#seek(namespace)]!;
  }

  /** `find` for a hash that lies in words, zero padded to 8: a million of them are read at a start. */
  findWords(namespace: number, words: Uint32Array, at: number, hashBytes: number): EntryNumber {
    const wanted = this.#wanted;
    for (let word = 0; word < 8; word++) wanted[word] = words[at + word]!;
    this.#wantedBytes = hashBytes;
    return this.#slots[this.#seek(namespace)]!;
  }

  /** The words of a row's hash, zero padded to 8, to `out` from `at` on; returns its bytes. */
  copyHash(entry: EntryNumber, out: Uint32Array, at: number): number {
    const row = this.#chunks[entry >>> chunkShift]!;
    const from = (entry & chunkMask) * words;
    for (let word = 0; word < 8; word++) out[at + word] = row[from + word]!;
    return row[from + field.flags]! >>> hashBytesShift;
  }

  /** Room for so many more listed rows, made at once. */
  reserve(count: number): void {
    let slotCount = this.#slots.length;
    while ((this.count + count) * 4 > slotCount * 3) slotCount *= 2;
    if (slotCount > this.#slots.length) this.#resize(slotCount);
  }

  /** A new, listed row for the name that was looked for last, under which nothing may be listed. */
  add(namespace: number, segment: number, page: number, pages: number): EntryNumber {
    this.reserve(1);
    const at = this.#seek(namespace);
    invariant(this.#slots[at] === noEntry, 'disk: a block is listed twice');
    const entry = this.#takeRow();
    this.#slots[at] = entry;
    const row = this.#chunks[entry >>> chunkShift]!;
    const from = (entry & chunkMask) * words;
    for (let word = 0; word < 8; word++) row[from + word] = this.#wanted[word]!;
    row[from + field.namespace] = namespace;
    row[from + field.segment] = segment;
    row[from + field.page] = page;
    row[from + field.pages] = pages;
    row[from + field.next] = 0;
    row[from + field.flags] = listedFlag | (this.#wantedBytes << hashBytesShift);
    const ends = this.#ends[entry >>> chunkShift];
    if (ends !== undefined) ends[entry & chunkMask] = 0;
    this.count++;
    return entry;
  }

  /** Not found by name any more; the number stays taken until `release`. */
  unlist(entry: EntryNumber): void {
    const from = (entry & chunkMask) * words;
    const row = this.#chunks[entry >>> chunkShift]!;
    invariant((row[from + field.flags]! & listedFlag) !== 0, 'disk: a block is unlisted twice');
    let hole = this.#home(entry);
    while (this.#slots[hole] !== entry) hole = (hole + 1) & (this.#slots.length - 1);
    row[from + field.flags]! &= ~listedFlag;
    this.count--;
    // What was pushed on by collisions moves back, so that no search ends too early.
    const mask = this.#slots.length - 1;
    for (let at = (hole + 1) & mask; this.#slots[at] !== noEntry; at = (at + 1) & mask) {
      const home = this.#home(this.#slots[at]!);
      if (((at - home) & mask) < ((at - hole) & mask)) continue;
      this.#slots[hole] = this.#slots[at]!;
      hole = at;
    }
    this.#slots[hole] = noEntry;
  }

  /** Give an unlisted row back. */
  release(entry: EntryNumber): void {
    invariant(!this.isListed(entry), 'disk: a listed row is given back');
    this.#set(entry, field.next, this.#free);
    this.#free = entry;
  }

  isListed(entry: EntryNumber): boolean {
    return (this.#get(entry, field.flags) & listedFlag) !== 0;
  }

  isHot(entry: EntryNumber): boolean {
    return (this.#get(entry, field.flags) & hotFlag) !== 0;
  }

  setHot(entry: EntryNumber): void {
    this.#set(entry, field.flags, this.#get(entry, field.flags) | hotFlag);
  }

  namespace(entry: EntryNumber): number {
    return this.#get(entry, field.namespace);
  }

  segment(entry: EntryNumber): number {
    return this.#get(entry, field.segment);
  }

  page(entry: EntryNumber): number {
    return this.#get(entry, field.page);
  }

  pages(entry: EntryNumber): number {
    return this.#get(entry, field.pages);
  }

  /** The next row of the same segment, by place. */
  next(entry: EntryNumber): EntryNumber {
    return this.#get(entry, field.next) - 1;
  }

  setNext(entry: EntryNumber, next: EntryNumber): void {
    this.#set(entry, field.next, next + 1);
  }

  lastUse(entry: EntryNumber): number {
    return this.#get(entry, field.useHigh) * 2 ** 32 + this.#get(entry, field.useLow);
  }

  setLastUse(entry: EntryNumber, use: number): void {
    this.#set(entry, field.useLow, use >>> 0);
    this.#set(entry, field.useHigh, Math.floor(use / 2 ** 32));
  }

  /** The end of the object, 0: none. */
  expiresS(entry: EntryNumber): number {
    return this.#ends[entry >>> chunkShift]?.[entry & chunkMask] ?? 0;
  }

  setExpiresS(entry: EntryNumber, expiresS: number): void {
    if (expiresS === this.expiresS(entry)) return;
    const ends = this.#ends[entry >>> chunkShift] ?? new Uint32Array(chunkMask + 1);
    this.#ends[entry >>> chunkShift] = ends;
    ends[entry & chunkMask] = expiresS;
  }

  hash(entry: EntryNumber): HashKey {
    const out = Buffer.allocUnsafe(32);
    const row = this.#chunks[entry >>> chunkShift]!;
    const from = (entry & chunkMask) * words;
    for (let word = 0; word < 8; word++) out.writeUInt32LE(row[from + word]!, word * 4);
    return out.toString('latin1', 0, row[from + field.flags]! >>> hashBytesShift) as HashKey;
  }

  #get(entry: EntryNumber, word: number): number {
    return this.#chunks[entry >>> chunkShift]![(entry & chunkMask) * words + word]!;
  }

  #set(entry: EntryNumber, word: number, value: number): void {
    this.#chunks[entry >>> chunkShift]![(entry & chunkMask) * words + word] = value;
  }

  #takeRow(): EntryNumber {
    if (this.#free !== noEntry) {
      const entry = this.#free;
      this.#free = this.#get(entry, field.next) | 0;
      return entry;
    }
    if (this.#rowCount >>> chunkShift === this.#chunks.length) {
      this.#chunks.push(new Uint32Array((chunkMask + 1) * words));
    }
    return this.#rowCount++;
  }

  #want(hash: HashKey): void {
    const { length } = hash;
    this.#wantedBytes = length;
    for (let word = 0; word < 8; word++) {
      const at = word * 4;
      this.#wanted[word] =
        at >= length
          ? 0
          : hash.charCodeAt(at) |
            (hash.charCodeAt(at + 1) << 8) |
            (hash.charCodeAt(at + 2) << 16) |
            (hash.charCodeAt(at + 3) << 24);
    }
  }

  /** The place of the wanted name, or the empty one where it would go. */
  #seek(namespace: number): number {
    const wanted = this.#wanted;
    const mask = this.#slots.length - 1;
    let at = mix(wanted[0]!, wanted[1]!, namespace) & mask;
    for (; ; at = (at + 1) & mask) {
      const entry = this.#slots[at]!;
      if (entry === noEntry) return at;
      const row = this.#chunks[entry >>> chunkShift]!;
      const from = (entry & chunkMask) * words;
      let word = 0;
      while (word < 8 && row[from + word] === wanted[word]) word++;
      if (word === 8 && row[from + field.namespace] === namespace) return at;
    }
  }

  #home(entry: EntryNumber): number {
    const row = this.#chunks[entry >>> chunkShift]!;
    const from = (entry & chunkMask) * words;
    return mix(row[from]!, row[from + 1]!, row[from + field.namespace]!) & (this.#slots.length - 1);
  }

  /** Row after row: in the order of the slots every look at a row would miss the caches. */
  #resize(slotCount: number): void {
    const slots = new Int32Array(slotCount).fill(noEntry);
    this.#slots = slots;
    const mask = slotCount - 1;
    for (let first = 0; first < this.#rowCount; first += chunkMask + 1) {
      const rows = this.#chunks[first >>> chunkShift]!;
      const count = Math.min(chunkMask + 1, this.#rowCount - first);
      for (let i = 0, from = 0; i < count; i++, from += words) {
        if ((rows[from + field.flags]! & listedFlag) === 0) continue;
        let at = mix(rows[from]!, rows[from + 1]!, rows[from + field.namespace]!) & mask;
        while (slots[at] !== noEntry) at = (at + 1) & mask;
        slots[at] = first + i;
      }
    }
  }
}

/** Chain hashes are uniform already; the namespace is stirred in. */
function mix(first: number, second: number, namespace: number): number {
  const mixed = Math.imul(first ^ Math.imul(namespace + 1, 0x9e3779b1), 0x85ebca6b) ^ second;
  return mixed ^ (mixed >>> 15);
}
