/**
 * Blocks by the second at which they end: a hierarchical timing wheel (Varghese and Lauck) over rows that the caller numbers.
 *
 *     level 0: seconds │ level 1: 64 s each │ level 2: 4096 s each │ …   a row stands where its second first differs from now
 *     each slot is a ring through the rows (previous, next), closed by a head of its own
 *
 * Invariants: memory for rows that are set and no others (48 bytes each, in chunks that go when they are empty), whatever has
 * passed through; setting and deleting touch one row and its two neighbours; `take` does at most so many steps as it was told,
 * so that no turn pays for a slot in which a million rows lie. Time never goes back.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';

/** Words of a row: second, previous, next, namespace and length of the hash, then the hash. */
const words = 12;
const at = { second: 0, previous: 1, next: 2, name: 3, hash: 4 } as const;
const hashBytes = (words - at.hash) * 4;
const lengthBits = 6;
const chunkBits = 12;
const chunkRows = 1 << chunkBits;
const digitBits = 6;
const digits = 1 << digitBits;
const digitMask = digits - 1;
const levels = Math.ceil(32 / digitBits);
/** Rings beside those of the slots. */
const due = levels * digits;
/** Of a slot whose time has come: rows are taken out of it one by one. */
const moving = due + 1;
const headCount = moving + 1;
/** Rings have negative names among the rows. */
const headOf = (ring: number): number => -1 - ring;

interface Chunk {
  readonly rows: Int32Array;
  readonly bytes: Buffer;
  used: number;
}

function emptyChunk(): Chunk {
  const bytes = Buffer.from(new ArrayBuffer(chunkRows * words * 4));
  return { rows: new Int32Array(bytes.buffer), bytes, used: 0 };
}

export class Deadlines {
  readonly #chunks: (Chunk | undefined)[] = [];
  /** The last one that became empty: rows that come and go do not make a chunk each time. */
  #spare: Chunk | undefined;
  /** Of each ring: its last and its first row. */
  readonly #heads = new Int32Array(2 * headCount);
  readonly #namespaces: ({ readonly namespace: Namespace; count: number } | undefined)[] = [];
  readonly #numbers = new Map<string, number>();
  readonly #freeNumbers: number[] = [];
  /** The second up to which slots were emptied. */
  #nowS: number;
  #count = 0;

  constructor(nowS: number) {
    this.#nowS = nowS;
    for (let ring = 0; ring < headCount; ring++) this.#heads.fill(headOf(ring), 2 * ring, 2 * ring + 2);
  }

  get count(): number {
    return this.#count;
  }

  get bytes(): number {
    return this.#chunks.reduce((sum, chunk) => sum + (chunk?.bytes.length ?? 0), this.#heads.byteLength);
  }

  /** The row ends at `second` (below 2^32), not when it was set to before. It is `nowS`. */
  set(row: number, namespace: Namespace, hash: HashKey, second: number, nowS: number): void {
    invariant(hash.length <= hashBytes, 'deadlines: a hash of more than 32 bytes');
    this.delete(row);
    if (this.#count === 0) this.#nowS = Math.max(this.#nowS, nowS); // nothing stands anywhere
    const chunk = this.#chunkOf(row);
    const from = (row & (chunkRows - 1)) * words;
    chunk.rows[from + at.second] = second;
    chunk.rows[from + at.name] = (this.#numberOf(namespace) << lengthBits) | hash.length;
    chunk.bytes.write(hash, (from + at.hash) * 4, 'latin1');
    chunk.used++;
    this.#count++;
    this.#place(row, second);
  }

  /** Nothing happens when it is not set. */
  delete(row: number): void {
    const chunk = this.#chunks[row >>> chunkBits];
    const from = (row & (chunkRows - 1)) * words;
    if (chunk === undefined || chunk.rows[from + at.name] === 0) return;
    this.#unlink(row);
    const number = chunk.rows[from + at.name]! >>> lengthBits;
    chunk.rows.fill(0, from, from + words);
    this.#count--;
    const space = this.#namespaces[number]!;
    if (--space.count === 0) {
      this.#numbers.delete(space.namespace.key);
      this.#namespaces[number] = undefined;
      this.#freeNumbers.push(number);
    }
    if (--chunk.used > 0) return;
    this.#chunks[row >>> chunkBits] = undefined;
    this.#spare = chunk;
  }

  clear(): void {
    this.#chunks.length = 0;
    this.#spare = undefined;
    this.#namespaces.length = 0;
    this.#freeNumbers.length = 0;
    this.#numbers.clear();
    this.#count = 0;
    for (let ring = 0; ring < headCount; ring++) this.#heads.fill(headOf(ring), 2 * ring, 2 * ring + 2);
  }

  /** When `take` has something to do next; `Infinity`: nothing is set. Not later than the earliest end. */
  get nextS(): number {
    if (!this.#isEmpty(due) || !this.#isEmpty(moving)) return this.#nowS;
    return this.#nextSlot()?.second ?? Number.POSITIVE_INFINITY;
  }

  /** Up to `count` blocks that have ended by `nowS`, by namespace; they are not set any more. At most `steps` rows are touched. */
  take(nowS: number, count: number, steps: number): Map<Namespace, HashKey[]> {
    const ended = new Map<Namespace, HashKey[]>();
    let left = count;
    for (let step = 0; step < steps && left > 0; step++) {
      const first = this.#firstOf(due);
      if (first >= 0) {
        this.#name(first, ended);
        this.delete(first);
        left--;
        continue;
      }
      const moved = this.#firstOf(moving);
      if (moved >= 0) {
        this.#unlink(moved);
        this.#place(moved, this.#word(moved, at.second) >>> 0);
        continue;
      }
      const slot = this.#nextSlot();
      if (slot === undefined || slot.second > nowS) {
        this.#nowS = Math.max(this.#nowS, nowS);
        break;
      }
      this.#nowS = slot.second;
      this.#moveAll(slot.ring);
    }
    return ended;
  }

  /** Throws InvariantError unless every row stands in the ring where it belongs. */
  checkIntegrity(): void {
    let seen = 0;
    for (let ring = 0; ring < headCount; ring++) {
      for (let row = this.#firstOf(ring); row >= 0; row = this.#word(row, at.next)) {
        seen++;
        const second = this.#word(row, at.second) >>> 0;
        const belongs = ring === moving || ring === this.#ringOf(second);
        invariant(belongs, 'deadlines: a row stands in a wrong ring');
      }
    }
    const used = this.#chunks.reduce((sum, chunk) => sum + (chunk?.used ?? 0), 0);
    const named = this.#namespaces.reduce((sum, space) => sum + (space?.count ?? 0), 0);
    invariant(seen === this.#count && used === seen && named === seen, 'deadlines: a row is lost');
  }

  #name(row: number, ended: Map<Namespace, HashKey[]>): void {
    const { rows, bytes } = this.#chunks[row >>> chunkBits]!;
    const from = (row & (chunkRows - 1)) * words;
    const name = rows[from + at.name]!;
    const { namespace } = this.#namespaces[name >>> lengthBits]!;
    const start = (from + at.hash) * 4;
    const hash = bytes.toString('latin1', start, start + (name & ((1 << lengthBits) - 1))) as HashKey;
    const hashes = ended.get(namespace);
    if (hashes === undefined) ended.set(namespace, [hash]);
    else hashes.push(hash);
  }

  /** The earliest slot with rows. In the lowest level that has any: what stands above differs from now in a higher digit. */
  #nextSlot(): { readonly ring: number; readonly second: number } | undefined {
    for (let level = 0; level < levels; level++) {
      const shift = level * digitBits;
      for (let digit = ((this.#nowS >>> shift) & digitMask) + 1; digit < digits; digit++) {
        const ring = level * digits + digit;
        if (this.#isEmpty(ring)) continue;
        const above = shift + digitBits >= 32 ? 0 : (this.#nowS >>> (shift + digitBits)) << (shift + digitBits);
        return { ring, second: (above | (digit << shift)) >>> 0 };
      }
    }
    return undefined;
  }

  #ringOf(second: number): number {
    if (second <= this.#nowS) return due;
    const level = Math.floor((31 - Math.clz32(second ^ this.#nowS)) / digitBits);
    return level * digits + ((second >>> (level * digitBits)) & digitMask);
  }

  #place(row: number, second: number): void {
    const head = headOf(this.#ringOf(second));
    const last = this.#previous(head);
    this.#gate(last, row);
    this.#gate(row, head);
  }

  #unlink(row: number): void {
    this.#gate(this.#word(row, at.previous), this.#word(row, at.next));
  }

  #moveAll(ring: number): void {
    const [from, to] = [headOf(ring), headOf(moving)];
    const [first, last] = [this.#firstOf(ring), this.#previous(from)];
    this.#gate(to, first);
    this.#gate(last, to);
    this.#gate(from, from);
  }

  #isEmpty(ring: number): boolean {
    return this.#heads[2 * ring + 1]! < 0;
  }

  #firstOf(ring: number): number {
    return this.#heads[2 * ring + 1]!;
  }

  #previous(row: number): number {
    return row < 0 ? this.#heads[2 * (-1 - row)]! : this.#word(row, at.previous);
  }

  #gate(row: number, next: number): void {
    if (row < 0) this.#heads[2 * (-1 - row) + 1] = next;
    else this.#setWord(row, at.next, next);
    if (next < 0) this.#heads[2 * (-1 - next)] = row;
    else this.#setWord(next, at.previous, row);
  }

  #word(row: number, word: number): number {
    return this.#chunks[row >>> chunkBits]!.rows[(row & (chunkRows - 1)) * words + word]!;
  }

  #setWord(row: number, word: number, value: number): void {
    this.#chunks[row >>> chunkBits]!.rows[(row & (chunkRows - 1)) * words + word] = value;
  }

  #chunkOf(row: number): Chunk {
    let chunk = this.#chunks[row >>> chunkBits];
    if (chunk === undefined) {
      chunk = this.#spare ?? emptyChunk();
      this.#spare = undefined;
      this.#chunks[row >>> chunkBits] = chunk;
    }
    return chunk;
  }

  #numberOf(namespace: Namespace): number {
    let number = this.#numbers.get(namespace.key);
    if (number === undefined) {
      // From 1 on: a row whose name is 0 is not set.
      number = this.#freeNumbers.pop() ?? Math.max(1, this.#namespaces.length);
      this.#namespaces[number] = { namespace, count: 0 };
      this.#numbers.set(namespace.key, number);
    }
    this.#namespaces[number]!.count++;
    return number;
  }
}
