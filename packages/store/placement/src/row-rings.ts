/**
 * Names of blocks by the number of a record that the caller has (of the index), each in one of several rings. Outside of V8's heap.
 *
 *     record ──mix (row-slots.ts of the tiers' kit)──▶ row: [ previous | next | name: namespace, length of the hash | record | hash 8 words |
 *                                                             values of the caller ]
 *     ring: head ⇄ row ⇄ row ⇄ … ⇄ head
 *
 * Records are scattered: whose blocks these are may have one in each hundred of the index. Rows are numbered anew, and lie dense.
 *
 * Invariants: memory for rows that are set and no others (48 bytes each, 4 more a value, and 10 to 15 to find it), in chunks that go when
 * they are empty, so that no call copies what is there; setting, moving and deleting touch one row and its neighbours.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import { RowSlots } from '@kvtier/tiers';

/** Words of a row; values follow. Of one that was given back, `next` is the one given back before it in its chunk. */
const at = { previous: 0, next: 1, name: 2, record: 3, hash: 4, values: 12 } as const;
const hashBytes = (at.values - at.hash) * 4;
const lengthBits = 6;
const lengthMask = (1 << lengthBits) - 1;
const chunkBits = 12;
const chunkRows = 1 << chunkBits;
const chunkMask = chunkRows - 1;
/** 2 to the power of it: so many shards. */
const shardBits = 6;
/** Not a row. */
const none = -1;
/** Rings have negative names among the rows. */
const headOf = (ring: number): number => -1 - ring;

interface Chunk {
  readonly rows: Int32Array;
  readonly bytes: Buffer;
  /** Rows that are set. */
  used: number;
  /** Rows that were set at one time or another: those behind them are free, too. */
  begun: number;
  /** The row of it that was deleted last, or `none`. */
  free: number;
}

export class RowRings {
  readonly #words: number;
  readonly #slots = new RowSlots(shardBits);
  readonly #leastSlotBytes = this.#slots.bytes;
  readonly #chunks: (Chunk | undefined)[] = [];
  /** Of these, where a row may be had. */
  readonly #roomy = new Set<number>();
  /** The numbers of those that are not there. */
  readonly #gaps: number[] = [];
  /** The last one that became empty: rows that come and go do not make a chunk each time. */
  #spare: Chunk | undefined;
  /** Of each ring: its last and its first row. */
  #heads: Int32Array;
  readonly #namespaces: ({ readonly namespace: Namespace; count: number } | undefined)[] = [];
  readonly #numbers = new Map<string, number>();
  readonly #freeNumbers: number[] = [];
  #count = 0;

  /** `values`: of a record, 32 bits each. */
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
    const rows = this.#chunks.reduce((sum, chunk) => sum + (chunk?.bytes.length ?? 0), 0);
    return rows + this.#heads.byteLength + this.#slots.bytes;
  }

  has(record: number): boolean {
    return this.#find(record) !== none;
  }

  /** A record that is not set comes to the end of a ring, with values of 0. */
  add(ring: number, record: number, namespace: Namespace, hash: HashKey): void {
    invariant(hash.length <= hashBytes, 'rows of names: a hash of more than 32 bytes');
    invariant(!this.has(record), 'rows of names: a record is set twice');
    if (ring >= this.ringCount) this.#moreRings(ring + 1);
    const row = this.#take();
    const { rows, bytes } = this.#chunks[row >>> chunkBits]!;
    const from = (row & chunkMask) * this.#words;
    rows.fill(0, from, from + this.#words);
    rows[from + at.name] = (this.#numberOf(namespace) << lengthBits) | hash.length;
    rows[from + at.record] = record;
    bytes.write(hash, (from + at.hash) * 4, 'latin1');
    this.#slots.add(mix(record), row);
    this.#count++;
    this.#append(ring, row);
  }

  /** Nothing happens when it is not set. */
  delete(record: number): void {
    const row = this.#find(record);
    if (row === none) return;
    const number = this.#word(row, at.name) >>> lengthBits;
    this.#unlink(row);
    this.#slots.remove(mix(record), row);
    this.#giveBack(row);
    const space = this.#namespaces[number]!;
    if (--space.count === 0) {
      this.#numbers.delete(space.namespace.key);
      this.#namespaces[number] = undefined;
      this.#freeNumbers.push(number);
    }
    if (--this.#count === 0 && this.#slots.bytes > this.#leastSlotBytes) this.#slots.clear();
  }

  /** As a whole, without a step for each row. */
  clear(): void {
    this.#slots.clear();
    this.#chunks.length = 0;
    this.#roomy.clear();
    this.#gaps.length = 0;
    this.#spare = undefined;
    this.#namespaces.length = 0;
    this.#freeNumbers.length = 0;
    this.#numbers.clear();
    this.#count = 0;
    this.#heads = emptyHeads(this.ringCount);
  }

  namespaceOf(record: number): Namespace {
    return this.#namespaces[this.#word(this.#rowOf(record), at.name) >>> lengthBits]!.namespace;
  }

  hashOf(record: number): HashKey {
    const row = this.#rowOf(record);
    const { rows, bytes } = this.#chunks[row >>> chunkBits]!;
    const from = (row & chunkMask) * this.#words;
    const start = (from + at.hash) * 4;
    return bytes.toString('latin1', start, start + (rows[from + at.name]! & lengthMask)) as HashKey;
  }

  /** Not negative. */
  value(record: number, which: number): number {
    return this.#word(this.#rowOf(record), at.values + which) >>> 0;
  }

  setValue(record: number, which: number, value: number): void {
    this.#setWord(this.#rowOf(record), at.values + which, value);
  }

  isEmpty(ring: number): boolean {
    return this.#firstRow(ring) < 0;
  }

  /** The first record of a ring that may be it; negative: there is none. */
  firstOf(ring: number, mayBe: (record: number) => boolean = () => true): number {
    for (let row = this.#firstRow(ring); row >= 0; row = this.#word(row, at.next)) {
      const record = this.#word(row, at.record);
      if (mayBe(record)) return record;
    }
    return none;
  }

  /** To the end of this ring. */
  move(ring: number, record: number): void {
    const row = this.#rowOf(record);
    this.#unlink(row);
    this.#append(ring, row);
  }

  /** Before another one, into its ring. */
  moveBefore(other: number, record: number): void {
    const [row, next] = [this.#rowOf(record), this.#rowOf(other)];
    this.#unlink(row);
    this.#gate(this.#previous(next), row);
    this.#gate(row, next);
  }

  /** All of a ring that is not empty into one that is. */
  moveAll(ring: number, to: number): void {
    const [from, head] = [headOf(ring), headOf(to)];
    const [first, last] = [this.#firstRow(ring), this.#previous(from)];
    this.#gate(head, first);
    this.#gate(last, head);
    this.#gate(from, from);
  }

  /** Throws InvariantError unless every record is in one ring, once. `each`: asked about each of them. */
  checkIntegrity(each: (ring: number, record: number) => void): void {
    let seen = 0;
    for (let ring = 0; ring < this.ringCount; ring++) {
      let before = headOf(ring);
      for (let row = this.#firstRow(ring); row >= 0; row = this.#word(row, at.next)) {
        const record = this.#word(row, at.record);
        invariant(this.#find(record) === row, 'rows of names: a record has another row');
        invariant(this.#previous(row) === before, 'rows of names: a ring is broken');
        invariant(++seen <= this.#count, 'rows of names: a ring has no end');
        each(ring, record);
        before = row;
      }
    }
    const used = this.#chunks.reduce((sum, chunk) => sum + (chunk?.used ?? 0), 0);
    const named = this.#namespaces.reduce((sum, space) => sum + (space?.count ?? 0), 0);
    const listed = this.#slots.checkIntegrity('rows of names', () => {});
    const isWhole = seen === this.#count && used === seen && named === seen && listed === seen;
    invariant(isWhole, 'rows of names: a row is lost');
    for (const [number, chunk] of this.#chunks.entries()) {
      const isRoomy = chunk !== undefined && chunk.used < chunkRows;
      invariant(this.#roomy.has(number) === isRoomy, 'rows of names: room is lost');
    }
  }

  /** The row of a record, or `none`. Records have the same mix only where they are the same. */
  #find(record: number): number {
    const mixed = mix(record);
    const { slots, length } = this.#slots.shardOf(mixed);
    for (let slot = this.#slots.homeOf(mixed, length); ; ) {
      const row = slots[2 * slot]! - 1;
      if (row === none || slots[2 * slot + 1] === mixed) return row;
      if (++slot === length) slot = 0;
    }
  }

  #rowOf(record: number): number {
    const row = this.#find(record);
    invariant(row !== none, 'rows of names: a record is not set');
    return row;
  }

  #firstRow(ring: number): number {
    return ring < this.ringCount ? this.#heads[2 * ring + 1]! : headOf(ring);
  }

  #append(ring: number, row: number): void {
    const head = headOf(ring);
    this.#gate(this.#previous(head), row);
    this.#gate(row, head);
  }

  #unlink(row: number): void {
    this.#gate(this.#word(row, at.previous), this.#word(row, at.next));
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

  /** A row that is not set, of the chunk that has had room for longest. */
  #take(): number {
    const [number = this.#makeChunk()] = this.#roomy;
    const chunk = this.#chunks[number]!;
    let row = chunk.free;
    if (row === none) row = (number << chunkBits) | chunk.begun++;
    else chunk.free = this.#word(row, at.next);
    if (++chunk.used === chunkRows) this.#roomy.delete(number);
    return row;
  }

  #giveBack(row: number): void {
    const number = row >>> chunkBits;
    const chunk = this.#chunks[number]!;
    this.#setWord(row, at.next, chunk.free);
    chunk.free = row;
    if (chunk.used-- === chunkRows) this.#roomy.add(number);
    if (chunk.used > 0) return;
    this.#chunks[number] = undefined;
    this.#roomy.delete(number);
    this.#gaps.push(number);
    this.#spare = Object.assign(chunk, { begun: 0, free: none });
  }

  #makeChunk(): number {
    const number = this.#gaps.pop() ?? this.#chunks.length;
    this.#chunks[number] = this.#spare ?? this.#emptyChunk();
    this.#spare = undefined;
    this.#roomy.add(number);
    return number;
  }

  #emptyChunk(): Chunk {
    const bytes = Buffer.from(new ArrayBuffer(chunkRows * this.#words * 4));
    return { rows: new Int32Array(bytes.buffer), bytes, used: 0, begun: 0, free: none };
  }

  #moreRings(least: number): void {
    const heads = emptyHeads(Math.max(least, 2 * this.ringCount));
    heads.set(this.#heads);
    this.#heads = heads;
  }

  #numberOf(namespace: Namespace): number {
    let number = this.#numbers.get(namespace.key);
    if (number === undefined) {
      number = this.#freeNumbers.pop() ?? this.#namespaces.length;
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

/** Of another record it is another one: MurmurHash3's final mix can be undone. */
function mix(record: number): number {
  const h = Math.imul(record ^ (record >>> 16), 0x85ebca6b);
  const g = Math.imul(h ^ (h >>> 13), 0xc2b2ae35);
  return g ^ (g >>> 16);
}
