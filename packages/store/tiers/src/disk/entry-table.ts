/**
 * The rows of the disk tier's index, packed: 64 bytes a block in chunks of typed arrays, outside of V8's heap.
 *
 *     words  0–7 hash · 8 namespace · 9 segment · 10 page · 11 pages · 12 lastUse, low · 13 lastUse, high · 14 next · 15 flags
 *
 *     namespace, hash ──▶ 32 bits ──▶ row number (row-slots.ts, about 12 bytes: it grows a part at a time)
 *
 * Invariant: exactly the rows that are `listed` are found by name. A row that is no longer listed keeps its number
 * until its segment gives all of its rows back, so that an I/O in flight may still ask about it.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';
import { RowSlots } from '../kit/row-slots.ts';

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
const shardBits = 9;

export class EntryTable {
  readonly #chunks: Uint32Array[] = [];
  /** Ends of the rows of each chunk (`Header.expiresS`); for chunks in which any row has one. */
  readonly #ends: (Uint32Array | undefined)[] = [];
  #rowCount = 0;
  /** Head of the list of rows that may be used again, through `next`. */
  #free = noEntry;
  readonly #slots = new RowSlots(shardBits);
  /** The name that is looked for. */
  readonly #wanted = new Uint32Array(8);
  #wantedBytes = 0;
  #wantedMix = 0;
  /** Rows that are listed. */
  count = 0;

  /** Rows that were ever used, listed or not. */
  get rowCount(): number {
    return this.#rowCount;
  }

  /** Bytes of memory that the table takes. */
  get bytes(): number {
    const endBytes = this.#ends.reduce((sum, ends) => sum + (ends?.byteLength ?? 0), 0);
    return this.#chunks.length * words * 4 * (chunkMask + 1) + this.#slots.bytes + endBytes;
  }

  find(namespace: number, hash: HashKey): EntryNumber {
    this.#want(hash);
    return this.#seek(namespace);
  }

  /** `find` for a hash that lies in words, zero padded to 8: a million of them are read at a start. */
  findWords(namespace: number, words: Uint32Array, at: number, hashBytes: number): EntryNumber {
    const wanted = this.#wanted;
    for (let word = 0; word < 8; word++) wanted[word] = words[at + word]!;
    this.#wantedBytes = hashBytes;
    return this.#seek(namespace);
  }

  /** The words of a row's hash, zero padded to 8, to `out` from `at` on; returns its bytes. */
  copyHash(entry: EntryNumber, out: Uint32Array, at: number): number {
    const row = this.#chunks[entry >>> chunkShift]!;
    const from = (entry & chunkMask) * words;
    for (let word = 0; word < 8; word++) out[at + word] = row[from + word]!;
    return row[from + field.flags]! >>> hashBytesShift;
  }

  /** A new, listed row for the name that was looked for last, under which nothing may be listed. */
  add(namespace: number, segment: number, page: number, pages: number): EntryNumber {
    invariant(this.#seek(namespace) === noEntry, 'disk: a block is listed twice');
    const entry = this.#takeRow();
    this.#slots.add(this.#wantedMix, entry);
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
    this.#slots.remove(mix(row[from]!, row[from + 1]!, row[from + field.namespace]!), entry);
    row[from + field.flags]! &= ~listedFlag;
    this.count--;
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

  /** The listed row of the wanted name. */
  #seek(namespace: number): EntryNumber {
    const wanted = this.#wanted;
    const h = mix(wanted[0]!, wanted[1]!, namespace);
    this.#wantedMix = h;
    const { slots, length } = this.#slots.shardOf(h);
    for (let slot = this.#slots.homeOf(h, length); ; ) {
      const entry = slots[2 * slot]! - 1;
      if (entry === noEntry) return noEntry;
      if (slots[2 * slot + 1] === h) {
        const row = this.#chunks[entry >>> chunkShift]!;
        const from = (entry & chunkMask) * words;
        let word = 0;
        while (word < 8 && row[from + word] === wanted[word]) word++;
        if (word === 8 && row[from + field.namespace] === namespace) return entry;
      }
      if (++slot === length) slot = 0;
    }
  }
}

/** Chain hashes are uniform already; the namespace is stirred in. Signed, as it is kept. */
function mix(first: number, second: number, namespace: number): number {
  const mixed = Math.imul(first ^ Math.imul(namespace + 1, 0x9e3779b1), 0x85ebca6b) ^ second;
  return Math.imul(mixed ^ (mixed >>> 15), 0x9e3779b1);
}
