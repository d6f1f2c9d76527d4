/**
 * The rows of the peer directory, packed: 40 bytes a block and about 12 to find it, in chunks of typed arrays, outside of V8's heap, as ten million strings
 * in maps would stop the world again and again.
 *
 *     words  0–7 hash, zero padded · 8 namespace, bytes of the hash in the top 8 bits (none: a free row) · 9 holders, word 0
 *     beside them, from when somebody has them on: words 1, 2, 3 of holders, 4 bytes a row each
 *     name ──▶ 32 bits ──▶ row number (row-slots.ts)
 *
 * Invariants: exactly the rows with a holder are found by name, and a row stays where it is until it has none.
 */
import { Buffer } from 'node:buffer';
import { invariant } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';
import { RowSlots } from '../kit/row-slots.ts';

/** No row. */
export const noRow = -1;

/** Of holders, 32 bits each. */
export const holderWords = 4;

const words = 10;
const namespaceAt = 8;
const holdersAt = 9;
const hashBytesShift = 24;
const namespaceMask = (1 << hashBytesShift) - 1;
const chunkBits = 13;
const chunkMask = (1 << chunkBits) - 1;
const shardBits = 9;

export class HolderTable {
  readonly #chunks: Int32Array[] = [];
  /** Words of holders beyond the first one, each in chunks as above; a chunk that is not there is all zeros. */
  readonly #more: (Int32Array | undefined)[][] = Array.from({ length: holderWords - 1 }, () => []);
  readonly #slots = new RowSlots(shardBits);
  /** The row given back last, each leads to the one before in its first word. */
  #free = noRow;
  #rowCount = 0;
  #count = 0;
  readonly #name = new Int32Array(namespaceAt + 1);
  readonly #text = Buffer.alloc(4 * namespaceAt);

  /** Rows that have a holder. */
  get count(): number {
    return this.#count;
  }

  /** Rows that were ever used. */
  get rowCount(): number {
    return this.#rowCount;
  }

  /** Bytes of memory. */
  get bytes(): number {
    let more = 0;
    for (const chunks of this.#more) for (const chunk of chunks) more += chunk === undefined ? 0 : 4;
    return (this.#chunks.length * words * 4 + more) * (chunkMask + 1) + this.#slots.bytes;
  }

  find(namespace: number, hash: HashKey): number {
    this.#read(namespace, hash);
    return this.#find(mix(this.#name));
  }

  /** More holders of a name, in one word. Returns whether it had any; with none, and no room for it, nothing changes. */
  add(namespace: number, hash: HashKey, word: number, holders: number, hasRoom: boolean): boolean {
    this.#read(namespace, hash);
    const h = mix(this.#name);
    const found = this.#find(h);
    if (found !== noRow) {
      const before = this.holders(found, word);
      if ((before & holders) !== holders) this.#put(found, word, before | holders);
      return true;
    }
    if (!hasRoom) return false;
    const row = this.#take();
    const chunk = this.#chunks[row >>> chunkBits]!;
    const at = (row & chunkMask) * words;
    const name = this.#name;
    for (let each = 0; each <= namespaceAt; each++) chunk[at + each] = name[each]!;
    this.#put(row, word, holders);
    this.#slots.add(h, row);
    this.#count++;
    return false;
  }

  /** Somebody holds what is in this row. */
  isListed(row: number): boolean {
    return this.#chunks[row >>> chunkBits]![(row & chunkMask) * words + namespaceAt]! >>> hashBytesShift !== 0;
  }

  /** Those of one word. */
  holders(row: number, word: number): number {
    if (word === 0) return this.#chunks[row >>> chunkBits]![(row & chunkMask) * words + holdersAt]!;
    const chunk = this.#more[word - 1]![row >>> chunkBits];
    return chunk === undefined ? 0 : chunk[row & chunkMask]!;
  }

  /** Those of one word of a row that is listed. Without any holder the row goes: returns whether it did. */
  setHolders(row: number, word: number, holders: number): boolean {
    this.#put(row, word, holders);
    for (let other = 0; other < holderWords; other++) if (this.holders(row, other) !== 0) return false;
    const chunk = this.#chunks[row >>> chunkBits]!;
    const at = (row & chunkMask) * words;
    this.#unlist(row, at, chunk);
    chunk[at] = this.#free;
    chunk[at + namespaceAt] = 0;
    this.#free = row;
    this.#count--;
    return true;
  }

  namespace(row: number): number {
    return this.#chunks[row >>> chunkBits]![(row & chunkMask) * words + namespaceAt]! & namespaceMask;
  }

  hash(row: number): HashKey {
    const chunk = this.#chunks[row >>> chunkBits]!;
    const at = (row & chunkMask) * words;
    for (let word = 0; word < namespaceAt; word++) this.#text.writeInt32LE(chunk[at + word]!, 4 * word);
    return this.#text.toString('latin1', 0, chunk[at + namespaceAt]! >>> hashBytesShift) as HashKey;
  }

  clear(): void {
    this.#chunks.length = 0;
    for (const chunks of this.#more) chunks.length = 0;
    this.#slots.clear();
    this.#free = noRow;
    this.#rowCount = 0;
    this.#count = 0;
  }

  /** Throws InvariantError. */
  checkIntegrity(): void {
    const listed = this.#slots.checkIntegrity('peer directory', (row) => {
      let isHeld = false;
      for (let word = 0; word < holderWords; word++) isHeld ||= this.holders(row, word) !== 0;
      invariant(isHeld && this.isListed(row), 'peer directory: a block that nobody holds');
      invariant(this.find(this.namespace(row), this.hash(row)) === row, 'peer directory: a row cannot be found');
    });
    let free = 0;
    for (let row = this.#free; row !== noRow; free++)
      row = this.#chunks[row >>> chunkBits]![(row & chunkMask) * words]!;
    invariant(listed === this.#count && listed + free === this.#rowCount, 'peer directory: a row is lost');
  }

  #put(row: number, word: number, holders: number): void {
    const at = row >>> chunkBits;
    if (word === 0) this.#chunks[at]![(row & chunkMask) * words + holdersAt] = holders;
    else {
      const chunks = this.#more[word - 1]!;
      if (chunks[at] === undefined) {
        if (holders === 0) return;
        // Up to this one, so that none is a hole.
        while (chunks.length < at) chunks.push(undefined);
        chunks[at] = new Int32Array(chunkMask + 1);
      }
      chunks[at]![row & chunkMask] = holders;
    }
  }

  #read(namespace: number, hash: HashKey): void {
    const { length } = hash;
    for (let word = 0; word < namespaceAt; word++) {
      const at = 4 * word;
      this.#name[word] =
        at >= length
          ? 0
          : hash.charCodeAt(at) |
            (hash.charCodeAt(at + 1) << 8) |
            (hash.charCodeAt(at + 2) << 16) |
            (hash.charCodeAt(at + 3) << 24);
    }
    this.#name[namespaceAt] = namespace | (length << hashBytesShift);
  }

  /** The row of the name that was read last. */
  #find(h: number): number {
    const name = this.#name;
    const { slots, length } = this.#slots.shardOf(h);
    for (let slot = this.#slots.homeOf(h, length); ; ) {
      const row = slots[2 * slot]! - 1;
      if (row === noRow) return noRow;
      if (slots[2 * slot + 1] === h) {
        const chunk = this.#chunks[row >>> chunkBits]!;
        const at = (row & chunkMask) * words;
        let word = 0;
        while (word <= namespaceAt && chunk[at + word] === name[word]) word++;
        if (word > namespaceAt) return row;
      }
      if (++slot === length) slot = 0;
    }
  }

  #take(): number {
    const row = this.#free;
    if (row !== noRow) {
      this.#free = this.#chunks[row >>> chunkBits]![(row & chunkMask) * words]!;
      return row;
    }
    if (this.#rowCount >>> chunkBits === this.#chunks.length)
      this.#chunks.push(new Int32Array((chunkMask + 1) * words));
    return this.#rowCount++;
  }

  #unlist(row: number, at: number, chunk: Int32Array): void {
    for (let word = 0; word <= namespaceAt; word++) this.#name[word] = chunk[at + word]!;
    this.#slots.remove(mix(this.#name), row);
  }
}

/** Chain hashes are uniform, but they are what others say: all of the name is stirred in. Signed, as it is kept. */
function mix(name: Int32Array): number {
  let h = Math.imul(name[namespaceAt]! + 1, 0x9e3779b1);
  for (let word = 0; word < namespaceAt; word++) {
    h = Math.imul(h ^ name[word]!, 0x85ebca6b);
    h ^= h >>> 15;
  }
  return h | 0;
}
