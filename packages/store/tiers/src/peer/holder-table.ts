/**
 * The rows of the peer directory, packed: 40 bytes a block and about 12 to find it, in chunks of typed arrays, outside of V8's heap, as ten million strings
 * in maps would stop the world again and again.
 *
 *     words  0–7 hash, zero padded · 8 namespace, bytes of the hash in the top 8 bits · 9 holders
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
    return this.#chunks.length * words * 4 * (chunkMask + 1) + this.#slots.bytes;
  }

  find(namespace: number, hash: HashKey): number {
    this.#read(namespace, hash);
    return this.#find(mix(this.#name));
  }

  /** More holders of a name. Returns those that it had; with none, and no room for it, nothing changes. */
  add(namespace: number, hash: HashKey, holders: number, hasRoom: boolean): number {
    this.#read(namespace, hash);
    const h = mix(this.#name);
    const found = this.#find(h);
    if (found !== noRow) {
      const before = this.holders(found);
      if ((before & holders) !== holders) this.setHolders(found, before | holders);
      return before;
    }
    if (!hasRoom) return 0;
    const row = this.#take();
    const chunk = this.#chunks[row >>> chunkBits]!;
    const at = (row & chunkMask) * words;
    const name = this.#name;
    for (let word = 0; word <= namespaceAt; word++) chunk[at + word] = name[word]!;
    chunk[at + holdersAt] = holders;
    this.#slots.add(h, row);
    this.#count++;
    return 0;
  }

  /** 0: nothing is listed in this row. */
  holders(row: number): number {
    return this.#chunks[row >>> chunkBits]![(row & chunkMask) * words + holdersAt]!;
  }

  /** Without holders the row goes. */
  setHolders(row: number, holders: number): void {
    const chunk = this.#chunks[row >>> chunkBits]!;
    const at = (row & chunkMask) * words;
    if (holders === 0) {
      this.#unlist(row, at, chunk);
      chunk[at] = this.#free;
      this.#free = row;
      this.#count--;
    }
    chunk[at + holdersAt] = holders;
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
    this.#slots.clear();
    this.#free = noRow;
    this.#rowCount = 0;
    this.#count = 0;
  }

  /** Throws InvariantError. */
  checkIntegrity(): void {
    const listed = this.#slots.checkIntegrity('peer directory', (row) => {
      invariant(this.holders(row) !== 0, 'peer directory: a block that nobody holds');
      invariant(this.find(this.namespace(row), this.hash(row)) === row, 'peer directory: a row cannot be found');
    });
    let free = 0;
    for (let row = this.#free; row !== noRow; free++)
      row = this.#chunks[row >>> chunkBits]![(row & chunkMask) * words]!;
    invariant(listed === this.#count && listed + free === this.#rowCount, 'peer directory: a row is lost');
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
