/**
 * The hashes of blocks as words, 32 bytes a row, zero padded: rows 0 … blockCount - 1 are the blocks' own hashes, rows behind
 * them further hashes of a block (of boundaries inside it). No string is made for a block that is cached or found.
 *
 * Where hashes can be made to collide (xxhash) a row has a second one, the digest of the same prefix under a cryptographic
 * hash, and two rows are equal when both are. It stands for all tokens and extra keys up to the block's end, so what is
 * compared is the content, not the block alone: 32 bytes a row, whatever the prefix is long.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';
import type { EventLog } from './events.ts';
import type { BlockHashes } from './request.ts';

export const rowWords = 8;

/** One hash to look for: `count` words of `words` from `at` on. Reused; valid until the next `HashRows.query`. */
export interface HashQuery {
  words: Uint32Array;
  at: number;
  count: number;
  /** The digest's words, from `digestAt` on, where digests are kept. */
  digest: Uint32Array;
  digestAt: number;
}

const noWords = new Uint32Array(0);

export class HashRows {
  words: Uint32Array;
  readonly #blockCount: number;
  /** 0: the row has no hash; else its words. */
  #counts: Uint8Array;
  /** Blocks of the rows behind the blocks' own. */
  readonly #owners: number[] = [];
  readonly #freeRows: number[] = [];
  readonly #scratch = new Uint32Array(rowWords);
  readonly #digestScratch = new Uint32Array(rowWords);
  readonly #query: HashQuery = { words: this.#scratch, at: 0, count: rowWords, digest: noWords, digestAt: 0 };
  /** Digests laid out as the hashes are; undefined: none are kept. */
  #digests: Uint32Array | undefined;

  constructor(blockCount: number, keepDigests = false) {
    this.#blockCount = blockCount;
    this.words = new Uint32Array(blockCount * rowWords);
    this.#counts = new Uint8Array(blockCount);
    if (keepDigests) this.#digests = new Uint32Array(blockCount * rowWords);
  }

  /** The hash at `index` of a chain. */
  query(hashes: BlockHashes, index: number): HashQuery {
    const packed = hashes.packedWords;
    const query = this.#query;
    if (packed === undefined) {
      query.count = wordsOf(hashes.keyAt(index), this.#scratch);
      query.words = this.#scratch;
      query.at = 0;
    } else {
      query.words = packed.words;
      query.count = packed.wordsPerHash;
      query.at = index * packed.wordsPerHash;
    }
    if (this.#digests !== undefined) this.#queryDigest(hashes.contentDigests, index);
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
    if (this.#counts[row] !== count) return false;
    const digests = this.#digests;
    if (digests === undefined) return true;
    const { digest, digestAt } = query;
    for (let word = 0; word < rowWords; word++) if (digests[first + word] !== digest[digestAt + word]) return false;
    return true;
  }

  same(row: number, other: number): boolean {
    for (let word = 0; word < rowWords; word++) {
      if (this.words[row * rowWords + word] !== this.words[other * rowWords + word]) return false;
    }
    const digests = this.#digests;
    if (digests === undefined) return true;
    for (let word = 0; word < rowWords; word++) {
      if (digests[row * rowWords + word] !== digests[other * rowWords + word]) return false;
    }
    return true;
  }

  set(row: number, { words, at, count, digest, digestAt }: HashQuery): void {
    const first = row * rowWords;
    const own = this.words;
    for (let word = 0; word < count; word++) own[first + word] = words[at + word]!;
    for (let word = count; word < rowWords; word++) own[first + word] = 0;
    this.#counts[row] = count;
    if (this.#digests === undefined) return;
    for (let word = 0; word < rowWords; word++) this.#digests[first + word] = digest[digestAt + word]!;
  }

  /** Row n gets the hash of block `places[n]` of a chain with `hashesPerBlock` hashes per block: the last one inside it. */
  setEach(rows: readonly number[], hashes: BlockHashes, places: readonly number[], hashesPerBlock: number): void {
    const packed = hashes.packedWords;
    if (packed?.wordsPerHash !== rowWords || this.#digests !== undefined) {
      for (let n = 0; n < rows.length; n++)
        this.set(rows[n]!, this.query(hashes, (places[n]! + 1) * hashesPerBlock - 1));
      return;
    }
    // The usual case, without a loop inside the loop.
    const own = this.words;
    const { words } = packed;
    for (let n = 0; n < rows.length; n++) {
      const to = rows[n]! * rowWords;
      const from = ((places[n]! + 1) * hashesPerBlock - 1) * rowWords;
      own[to] = words[from]!;
      own[to + 1] = words[from + 1]!;
      own[to + 2] = words[from + 2]!;
      own[to + 3] = words[from + 3]!;
      own[to + 4] = words[from + 4]!;
      own[to + 5] = words[from + 5]!;
      own[to + 6] = words[from + 6]!;
      own[to + 7] = words[from + 7]!;
      this.#counts[rows[n]!] = rowWords;
    }
  }

  /** The hash of one row to another one that has none. */
  move(source: number, target: number): void {
    const from = source * rowWords;
    this.words.copyWithin(target * rowWords, from, from + rowWords);
    this.#digests?.copyWithin(target * rowWords, from, from + rowWords);
    this.#counts[target] = this.#counts[source]!;
    this.#counts[source] = 0;
  }

  clear(rows: readonly number[]): void {
    const counts = this.#counts;
    for (let i = 0; i < rows.length; i++) counts[rows[i]!] = 0;
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
    this.clear([row]);
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
    return keyIn(this.words, row, this.#counts[row]!);
  }

  /** The keys of all rows as they are now: a copy of their words, made at once; the keys are made as they are asked for. */
  copyOfKeys(): (row: number) => HashKey | undefined {
    const words = this.words.slice();
    const counts = this.#counts.slice();
    return (row) => keyIn(words, row, counts[row]!);
  }

  /** 52 bits of a row's hash. */
  nameOf(row: number): number {
    return this.words[row * rowWords]! + (this.words[row * rowWords + 1]! & 0xf_ffff) * 2 ** 32;
  }

  /** Says that a row's hash can no longer be found; nothing where it has none. */
  tellRemoved(events: EventLog, row: number, group: number): void {
    const count = this.#counts[row]!;
    if (count > 0) events.addRemoved(this.words, row * rowWords, count, group);
  }

  /** What tells the row's content from any other: its key, and its digest where they are kept. For integrity checks. */
  contentOf(row: number): string | undefined {
    const key = this.keyOf(row);
    if (key === undefined || this.#digests === undefined) return key;
    return `${key} ${this.#digests.subarray(row * rowWords, (row + 1) * rowWords).join()}`;
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
    if (this.#digests !== undefined) {
      const digests = new Uint32Array(rows * rowWords);
      digests.set(this.#digests);
      this.#digests = digests;
    }
    const counts = new Uint8Array(rows);
    counts.set(this.#counts);
    this.#counts = counts;
  }

  #queryDigest(digests: BlockHashes | undefined, index: number): void {
    invariant(digests !== undefined, 'block hashes: this pool compares content, and the request has no digests of it');
    const packed = digests.packedWords;
    const count = packed === undefined ? wordsOf(digests.keyAt(index), this.#digestScratch) : packed.wordsPerHash;
    invariant(count === rowWords, () => `block hashes: a digest of ${count * 4} bytes`);
    this.#query.digest = packed === undefined ? this.#digestScratch : packed.words;
    this.#query.digestAt = packed === undefined ? 0 : index * rowWords;
  }
}

function keyIn(words: Uint32Array, row: number, count: number): HashKey | undefined {
  if (count === 0) return undefined;
  return Buffer.from(words.buffer, words.byteOffset + row * rowWords * 4, count * 4).toString('latin1') as HashKey;
}

/** A key's bytes as words, little-endian; returns how many. */
function wordsOf(key: HashKey, words: Uint32Array): number {
  invariant(key.length === 16 || key.length === 32, () => `hash of ${key.length} bytes`);
  const count = key.length / 4;
  for (let word = 0; word < count; word++) {
    const at = word * 4;
    words[word] =
      key.charCodeAt(at) |
      (key.charCodeAt(at + 1) << 8) |
      (key.charCodeAt(at + 2) << 16) |
      (key.charCodeAt(at + 3) << 24);
  }
  return count;
}
