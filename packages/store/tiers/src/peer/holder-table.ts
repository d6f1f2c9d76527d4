/**
 * The rows of the peer directory, packed: 40 bytes a block and about 12 to find it, in chunks of typed arrays, outside of V8's heap, as ten million strings
 * in maps would stop the world again and again.
 *
 *     words  0–7 hash, zero padded · 8 namespace, bytes of the hash in the top 8 bits · 9 holders
 *     name ──▶ shard (top bits) ──▶ slot, linear probing ──▶ row number + 1, and beside it the name's hash, so that no row is
 *     looked at but the right one
 *
 * Invariants: exactly the rows with a holder are found by name, and a row stays where it is until it has none; a shard is at most
 * 80 % full and grows alone, by half, so that no turn pays for all of them; removal shifts back (Knuth 6.4 R).
 */
import { Buffer } from 'node:buffer';
import { invariant } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';

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
const firstSlots = 16;

/** Two words a slot, side by side for the cache's sake: row number + 1 (0: free), and what `mix` made of its name. */
interface Shard {
  slots: Int32Array;
  length: number;
  count: number;
}

const shardOf = (length: number): Shard => ({ slots: new Int32Array(2 * length), length, count: 0 });

export class HolderTable {
  readonly #chunks: Int32Array[] = [];
  readonly #shards: Shard[] = Array.from({ length: 1 << shardBits }, (_, number) => shardOf(firstSlotsOf(number)));
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
    const rows = this.#chunks.length * words * 4 * (chunkMask + 1);
    return this.#shards.reduce((sum, { slots }) => sum + slots.byteLength, rows);
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
    const shard = this.#shards[h >>> (32 - shardBits)]!;
    if ((shard.count + 1) * 5 > shard.length * 4) grow(shard);
    place(shard, h, row + 1);
    shard.count++;
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
    for (const [number, shard] of this.#shards.entries()) Object.assign(shard, shardOf(firstSlotsOf(number)));
    this.#free = noRow;
    this.#rowCount = 0;
    this.#count = 0;
  }

  /** Throws InvariantError. */
  checkIntegrity(): void {
    let listed = 0;
    for (const [number, { slots, length, count }] of this.#shards.entries()) {
      let used = 0;
      for (let slot = 0; slot < length; slot++) {
        const entry = slots[2 * slot]!;
        if (entry === 0) continue;
        used++;
        const row = entry - 1;
        invariant(this.holders(row) !== 0, 'peer directory: a block that nobody holds');
        invariant(
          slots[2 * slot + 1]! >>> (32 - shardBits) === number,
          'peer directory: a row is listed in a wrong shard',
        );
        invariant(this.find(this.namespace(row), this.hash(row)) === row, 'peer directory: a row cannot be found');
      }
      invariant(used === count, 'peer directory: a shard miscounts');
      listed += used;
    }
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
    const { slots, length } = this.#shards[h >>> (32 - shardBits)]!;
    for (let slot = homeOf(h, length); ; ) {
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
    const h = mix(this.#name);
    const shard = this.#shards[h >>> (32 - shardBits)]!;
    const { slots, length } = shard;
    let hole = homeOf(h, length);
    while (slots[2 * hole] !== row + 1) hole = hole + 1 === length ? 0 : hole + 1;
    for (let next = hole; ; ) {
      next = next + 1 === length ? 0 : next + 1;
      if (slots[2 * next] === 0) break;
      const home = homeOf(slots[2 * next + 1]!, length);
      if ((next - home + length) % length < (next - hole + length) % length) continue;
      slots[2 * hole] = slots[2 * next]!;
      slots[2 * hole + 1] = slots[2 * next + 1]!;
      hole = next;
    }
    slots[2 * hole] = 0;
    shard.count--;
  }
}

/** Shards fill up alike: they begin with different sizes, so that they do not all grow at the same time. */
const firstSlotsOf = (shard: number): number => Math.floor(firstSlots * 1.5 ** (shard / (1 << shardBits)));

function place({ slots, length }: Shard, h: number, entry: number): void {
  let slot = homeOf(h, length);
  while (slots[2 * slot] !== 0) if (++slot === length) slot = 0;
  slots[2 * slot] = entry;
  slots[2 * slot + 1] = h;
}

function grow(shard: Shard): void {
  const { slots, length, count } = shard;
  Object.assign(shard, shardOf(length + (length >>> 1)), { count });
  for (let at = 0; at < slots.length; at += 2) if (slots[at] !== 0) place(shard, slots[at + 1]!, slots[at]!);
}

/** The bits below those that chose the shard, spread over its slots. */
function homeOf(h: number, slots: number): number {
  return ((((h << shardBits) >>> 0) * slots) / 0x1_0000_0000) | 0;
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
