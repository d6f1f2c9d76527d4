/**
 * Names of blocks in rows that the caller numbers (records of the index), each in one of several rings. Outside of V8's heap.
 *
 *     row: [ previous | next | name: namespace, length of the hash | hash 8 words | values of the caller ]
 *     ring: head ⇄ row ⇄ row ⇄ … ⇄ head
 *
 * Invariants: memory for rows that are set and no others (44 bytes each, 4 more a value), in chunks that go when they are empty, so that
 * no call copies what is there; setting, moving and deleting touch one row and its neighbours.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';

/** Words of a row; values follow. */
const at = { previous: 0, next: 1, name: 2, hash: 3, values: 11 } as const;
const hashBytes = (at.values - at.hash) * 4;
const lengthBits = 6;
const lengthMask = (1 << lengthBits) - 1;
const chunkBits = 12;
const chunkRows = 1 << chunkBits;
const chunkMask = chunkRows - 1;
/** Rings have negative names among the rows. */
const headOf = (ring: number): number => -1 - ring;

interface Chunk {
  readonly rows: Int32Array;
  readonly bytes: Buffer;
  used: number;
}

export class RowRings {
  readonly #words: number;
  readonly #chunks: (Chunk | undefined)[] = [];
  /** The last one that became empty: rows that come and go do not make a chunk each time. */
  #spare: Chunk | undefined;
  /** Of each ring: its last and its first row. */
  #heads: Int32Array;
  readonly #namespaces: ({ readonly namespace: Namespace; count: number } | undefined)[] = [];
  readonly #numbers = new Map<string, number>();
  readonly #freeNumbers: number[] = [];
  #count = 0;

  /** `values`: of a row, 32 bits each. */
  constructor(values: number, rings: number) {
    this.#words = at.values + values;
    this.#heads = emptyHeads(rings);
  }

  get count(): number {
    return this.#count;
  }

  get ringCount(): number {
    return this.#heads.length / 2;
  }

  get bytes(): number {
    return this.#chunks.reduce((sum, chunk) => sum + (chunk?.bytes.length ?? 0), this.#heads.byteLength);
  }

  has(row: number): boolean {
    const chunk = this.#chunks[row >>> chunkBits];
    return chunk !== undefined && chunk.rows[(row & chunkMask) * this.#words + at.name] !== 0;
  }

  /** A row that is not set comes to the end of a ring, with values of 0. */
  add(ring: number, row: number, namespace: Namespace, hash: HashKey): void {
    invariant(hash.length <= hashBytes, 'rows of names: a hash of more than 32 bytes');
    invariant(!this.has(row), 'rows of names: a row is set twice');
    if (ring >= this.ringCount) this.#moreRings(ring + 1);
    const chunk = this.#chunkOf(row);
    const from = (row & chunkMask) * this.#words;
    chunk.rows[from + at.name] = (this.#numberOf(namespace) << lengthBits) | hash.length;
    chunk.bytes.write(hash, (from + at.hash) * 4, 'latin1');
    chunk.used++;
    this.#count++;
    this.append(ring, row);
  }

  /** Nothing happens when it is not set. */
  delete(row: number): void {
    if (!this.has(row)) return;
    const chunk = this.#chunks[row >>> chunkBits]!;
    const from = (row & chunkMask) * this.#words;
    this.unlink(row);
    const number = chunk.rows[from + at.name]! >>> lengthBits;
    chunk.rows.fill(0, from, from + this.#words);
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

  /** As a whole, without a step for each row. */
  clear(): void {
    this.#chunks.length = 0;
    this.#spare = undefined;
    this.#namespaces.length = 0;
    this.#freeNumbers.length = 0;
    this.#numbers.clear();
    this.#count = 0;
    this.#heads = emptyHeads(this.ringCount);
  }

  namespaceOf(row: number): Namespace {
    return this.#namespaces[this.#word(row, at.name) >>> lengthBits]!.namespace;
  }

  hashOf(row: number): HashKey {
    const { rows, bytes } = this.#chunks[row >>> chunkBits]!;
    const from = (row & chunkMask) * this.#words;
    const start = (from + at.hash) * 4;
    return bytes.toString('latin1', start, start + (rows[from + at.name]! & lengthMask)) as HashKey;
  }

  /** Not negative. */
  value(row: number, which: number): number {
    return this.#word(row, at.values + which) >>> 0;
  }

  setValue(row: number, which: number, value: number): void {
    this.#setWord(row, at.values + which, value);
  }

  isEmpty(ring: number): boolean {
    return this.firstOf(ring) < 0;
  }

  /** Negative: there is none. */
  firstOf(ring: number): number {
    return ring < this.ringCount ? this.#heads[2 * ring + 1]! : headOf(ring);
  }

  /** The one behind it in its ring; negative: there is none. */
  next(row: number): number {
    return this.#word(row, at.next);
  }

  /** A row that is in no ring comes to the end of this one. */
  append(ring: number, row: number): void {
    const head = headOf(ring);
    this.#gate(this.#previous(head), row);
    this.#gate(row, head);
  }

  /** A row that is in no ring comes before another, into its ring. */
  insertBefore(other: number, row: number): void {
    this.#gate(this.#previous(other), row);
    this.#gate(row, other);
  }

  /** Out of its ring: it has to come into one, or to be deleted, before anything else happens. */
  unlink(row: number): void {
    this.#gate(this.#word(row, at.previous), this.#word(row, at.next));
  }

  /** All of a ring that is not empty into one that is. */
  moveAll(ring: number, to: number): void {
    const [from, head] = [headOf(ring), headOf(to)];
    const [first, last] = [this.firstOf(ring), this.#previous(from)];
    this.#gate(head, first);
    this.#gate(last, head);
    this.#gate(from, from);
  }

  /** Throws InvariantError unless every row is in one ring, once. `each`: asked about each of them. */
  checkIntegrity(each: (ring: number, row: number) => void): void {
    let seen = 0;
    for (let ring = 0; ring < this.ringCount; ring++) {
      let before = headOf(ring);
      for (let row = this.firstOf(ring); row >= 0; row = this.next(row)) {
        invariant(this.has(row) && this.#previous(row) === before, 'rows of names: a ring is broken');
        invariant(++seen <= this.#count, 'rows of names: a ring has no end');
        each(ring, row);
        before = row;
      }
    }
    const used = this.#chunks.reduce((sum, chunk) => sum + (chunk?.used ?? 0), 0);
    const named = this.#namespaces.reduce((sum, space) => sum + (space?.count ?? 0), 0);
    invariant(seen === this.#count && used === seen && named === seen, 'rows of names: a row is lost');
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
    return this.#chunks[row >>> chunkBits]!.rows[(row & chunkMask) * this.#words + word]!;
  }

  #setWord(row: number, word: number, value: number): void {
    this.#chunks[row >>> chunkBits]!.rows[(row & chunkMask) * this.#words + word] = value;
  }

  #chunkOf(row: number): Chunk {
    let chunk = this.#chunks[row >>> chunkBits];
    if (chunk === undefined) {
      chunk = this.#spare ?? this.#emptyChunk();
      this.#spare = undefined;
      this.#chunks[row >>> chunkBits] = chunk;
    }
    return chunk;
  }

  #emptyChunk(): Chunk {
    const bytes = Buffer.from(new ArrayBuffer(chunkRows * this.#words * 4));
    return { rows: new Int32Array(bytes.buffer), bytes, used: 0 };
  }

  #moreRings(least: number): void {
    const heads = emptyHeads(Math.max(least, 2 * this.ringCount));
    heads.set(this.#heads);
    this.#heads = heads;
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

function emptyHeads(rings: number): Int32Array {
  return Int32Array.from({ length: 2 * rings }, (_, at) => headOf(at >>> 1));
}
