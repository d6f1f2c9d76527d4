/**
 * The hashes of blocks as words, 32 bytes a row, zero padded: rows 0 … blockCount - 1 are the blocks' own hashes, rows behind
 * them further hashes of a block (of boundaries inside it). No string is made for a block that is cached or found.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';
import type { BlockHashes } from './request.ts';

export const rowWords = 8;

/** One hash to look for: `count` words of `words` from `at` on. Reused; valid until the next `HashRows.query`. */
export interface HashQuery {
  words: Uint32Array;
  at: number;
  count: number;
}

export class HashRows {
  words: Uint32Array;
  readonly #blockCount: number;
  /** 0: the row has no hash; else its words. */
  #counts: Uint8Array;
  /** Blocks of the rows behind the blocks' own. */
  readonly #owners: number[] = [];
  readonly #freeRows: number[] = [];
  readonly #scratch = new Uint32Array(rowWords);
  readonly #query: HashQuery = { words: this.#scratch, at: 0, count: rowWords };

  constructor(blockCount: number) {
    this.#blockCount = blockCount;
    this.words = new Uint32Array(blockCount * rowWords);
    this.#counts = new Uint8Array(blockCount);
  }

  /** The hash at `index` of a chain. */
  query(hashes: BlockHashes, index: number): HashQuery {
    const packed = hashes.packedWords;
    const query = this.#query;
    if (packed === undefined) return this.queryOf(hashes.keyAt(index));
    query.words = packed.words;
    query.count = packed.wordsPerHash;
    query.at = index * packed.wordsPerHash;
    return query;
  }

  queryOf(key: HashKey): HashQuery {
    invariant(key.length === 16 || key.length === 32, () => `hash of ${key.length} bytes`);
    const query = this.#query;
    for (let word = 0; word < key.length / 4; word++) {
      const at = word * 4;
      this.#scratch[word] =
        key.charCodeAt(at) |
        (key.charCodeAt(at + 1) << 8) |
        (key.charCodeAt(at + 2) << 16) |
        (key.charCodeAt(at + 3) << 24);
    }
    query.words = this.#scratch;
    query.at = 0;
    query.count = key.length / 4;
    return query;
  }

  has(row: number): boolean {
    return this.#counts[row] !== 0;
  }

  equals(row: number, query: HashQuery): boolean {
    const { words, at, count } = query;
    const own = this.words;
    const first = row * rowWords;
    for (let word = 0; word < count; word++) if (own[first + word] !== words[at + word]) return false;
    return this.#counts[row] === count;
  }

  same(row: number, other: number): boolean {
    for (let word = 0; word < rowWords; word++) {
      if (this.words[row * rowWords + word] !== this.words[other * rowWords + word]) return false;
    }
    return true;
  }

  set(row: number, { words, at, count }: HashQuery): void {
    const first = row * rowWords;
    for (let word = 0; word < count; word++) this.words[first + word] = words[at + word]!;
    for (let word = count; word < rowWords; word++) this.words[first + word] = 0;
    this.#counts[row] = count;
  }

  clear(row: number): void {
    this.#counts[row] = 0;
  }

  /** A row for one more hash of a block; given back with `removeExtra`. */
  addExtra(block: number, query: HashQuery): number {
    const row = this.#freeRows.pop() ?? this.#blockCount + this.#owners.length;
    if (row >= this.#counts.length) this.#grow(row + 64);
    this.#owners[row - this.#blockCount] = block;
    this.set(row, query);
    return row;
  }

  removeExtra(row: number): void {
    this.clear(row);
    this.#freeRows.push(row);
  }

  setOwner(row: number, block: number): void {
    this.#owners[row - this.#blockCount] = block;
  }

  blockOf(row: number): number {
    return row < this.#blockCount ? row : this.#owners[row - this.#blockCount]!;
  }

  /** The hash of a row as a key; undefined: none. */
  keyOf(row: number): HashKey | undefined {
    const count = this.#counts[row]!;
    if (count === 0) return undefined;
    const bytes = Buffer.from(this.words.buffer, this.words.byteOffset + row * rowWords * 4, count * 4);
    return bytes.toString('latin1') as HashKey;
  }

  clearAll(): void {
    this.#counts.fill(0);
    this.#owners.length = 0;
    this.#freeRows.length = 0;
  }

  #grow(rows: number): void {
    const words = new Uint32Array(rows * rowWords);
    words.set(this.words);
    this.words = words;
    const counts = new Uint8Array(rows);
    counts.set(this.#counts);
    this.#counts = counts;
  }
}
