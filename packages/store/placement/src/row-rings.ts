/**
 * Names of blocks by the number of a record that the caller has (of the index), each in one of several rings. Outside of V8's heap.
 *
 *     record ──mix (row-slots.ts of the tiers' kit)──▶ row: [ previous | next | name: namespace, length of the hash | record | hash 8 words |
 *                                                             values of the caller ]
 *     ring: head ⇄ row ⇄ row ⇄ … ⇄ head
 *
 * Records are scattered: whose blocks these are may have one in each hundred of the index. Rows are numbered anew, and lie dense. A row is
 * looked for once: it is its record's until it is dropped, and all else is asked of the row.
 *
 * Invariants: 48 bytes for each row, 4 more a value, and 10 to 15 to find it (up to 40 where most have gone). Rows lie in chunks of 4,096
 * that go when they are empty: rows that come and go take about the memory of the most that were there at a time. Rows are not copied; what
 * finds them is, a 64th of it in one call (4 ms where there are ten million). Setting, moving and dropping touch one row and its neighbours.
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
export const noRow = -1;
/** Rings have negative names among the rows. */
const headOf = (ring: number): number => -1 - ring;

interface Chunk {
  readonly rows: Int32Array;
  readonly bytes: Buffer;
  /** Rows that are set. */
  used: number;
  /** Rows that were set at one time or another: those behind them are free, too. */
  begun: number;
  /** The row of it that was dropped last, or `noRow`. */
  free: number;
  /** Where it is among those with room; -1: it is full. */
  place: number;
}

export class RowRings {
  readonly #words: number;
  readonly #slots = new RowSlots(shardBits);
  readonly #chunks: (Chunk | undefined)[] = [];
  /** The numbers of these where a row may be had. What was full until just now stands last, and is filled first. */
  readonly #roomy: number[] = [];
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

  /** The row of a record, or `noRow`. Records have the same mix only where they are the same. */
  find(record: number): number {
    const mixed = mix(record);
    const { slots, length } = this.#slots.shardOf(mixed);
    for (let slot = this.#slots.homeOf(mixed, length); ; ) {
      const row = slots[2 * slot]! - 1;
      if (row === noRow || slots[2 * slot + 1] === mixed) return row;
      if (++slot === length) slot = 0;
    }
  }

  /** A record that is not set comes to the end of a ring, with values of 0. Its row; `noRow`: it is set, and nothing happens. */
  add(ring: number, record: number, namespace: Namespace, hash: HashKey): number {
    if (this.find(record) !== noRow) return noRow;
    const name = this.#nameOf(namespace, hash);
    if (ring >= this.ringCount) this.#moreRings(ring + 1);
    const row = this.#take();
    const { rows } = this.#chunks[row >>> chunkBits]!;
    const from = (row & chunkMask) * this.#words;
    for (let word = at.values; word < this.#words; word++) rows[from + word] = 0;
    rows[from + at.record] = record;
    this.#nameIt(row, name, hash);
    this.#slots.add(mix(record), row);
    this.#count++;
    this.#append(ring, row);
    return row;
  }

  /** It has another name from now on. */
  rename(row: number, namespace: Namespace, hash: HashKey): void {
    const before = this.#word(row, at.name);
    this.#nameIt(row, this.#nameOf(namespace, hash), hash);
    this.#unname(before);
  }

  /** It is nobody's any more. */
  drop(row: number): void {
    this.#unname(this.#word(row, at.name));
    this.#unlink(row);
    this.#slots.remove(mix(this.recordOf(row)), row);
    this.#giveBack(row);
    this.#count--;
  }

  /** As a whole, without a step for each row. */
  clear(): void {
    this.#slots.clear();
    this.#chunks.length = 0;
    this.#roomy.length = 0;
    this.#gaps.length = 0;
    this.#spare = undefined;
    this.#namespaces.length = 0;
    this.#freeNumbers.length = 0;
    this.#numbers.clear();
    this.#count = 0;
    this.#heads = emptyHeads(this.ringCount);
  }

  recordOf(row: number): number {
    return this.#word(row, at.record);
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
    return this.#firstRow(ring) < 0;
  }

  /** The first row of a ring that may be it, or `noRow`. */
  firstOf(ring: number, mayBe: (row: number) => boolean = () => true): number {
    for (let row = this.#firstRow(ring); row >= 0; row = this.#word(row, at.next)) if (mayBe(row)) return row;
    return noRow;
  }

  /** To the end of this ring. */
  move(ring: number, row: number): void {
    this.#unlink(row);
    this.#append(ring, row);
  }

  /** Before another one, into its ring. */
  moveBefore(next: number, row: number): void {
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

  /** Throws InvariantError unless every row is in one ring, once. `each`: asked about each of them. */
  checkIntegrity(each: (ring: number, row: number) => void): void {
    let seen = 0;
    for (let ring = 0; ring < this.ringCount; ring++) {
      let before = headOf(ring);
      for (let row = this.#firstRow(ring); row >= 0; row = this.#word(row, at.next)) {
        invariant(this.find(this.recordOf(row)) === row, 'rows of names: a record has another row');
        invariant(this.#previous(row) === before, 'rows of names: a ring is broken');
        invariant(++seen <= this.#count, 'rows of names: a ring has no end');
        each(ring, row);
        before = row;
      }
    }
    const used = this.#chunks.reduce((sum, chunk) => sum + (chunk?.used ?? 0), 0);
    const named = this.#namespaces.reduce((sum, space) => sum + (space?.count ?? 0), 0);
    const listed = this.#slots.checkIntegrity('rows of names', () => {});
    const isWhole = seen === this.#count && used === seen && named === seen && listed === seen;
    invariant(isWhole, 'rows of names: a row is lost');
    let roomy = 0;
    for (const [number, chunk] of this.#chunks.entries()) {
      if (chunk === undefined) continue;
      const isRoomy = chunk.used < chunkRows;
      if (isRoomy) roomy++;
      invariant(isRoomy ? this.#roomy[chunk.place] === number : chunk.place === -1, 'rows of names: room is lost');
    }
    invariant(roomy === this.#roomy.length, 'rows of names: there is no such room');
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

  /** A row that is nobody's. */
  #take(): number {
    const number = this.#roomy.at(-1) ?? this.#makeChunk();
    const chunk = this.#chunks[number]!;
    let row = chunk.free;
    if (row === noRow) row = (number << chunkBits) | chunk.begun++;
    else chunk.free = this.#word(row, at.next);
    if (++chunk.used === chunkRows) this.#hasNoRoom(chunk);
    return row;
  }

  #giveBack(row: number): void {
    const number = row >>> chunkBits;
    const chunk = this.#chunks[number]!;
    this.#setWord(row, at.next, chunk.free);
    chunk.free = row;
    if (chunk.used-- === chunkRows) this.#hasRoom(chunk, number);
    if (chunk.used > 0) return;
    this.#chunks[number] = undefined;
    this.#hasNoRoom(chunk);
    this.#gaps.push(number);
    this.#spare = Object.assign(chunk, { begun: 0, free: noRow });
  }

  #makeChunk(): number {
    const number = this.#gaps.pop() ?? this.#chunks.length;
    const chunk = this.#spare ?? this.#emptyChunk();
    this.#chunks[number] = chunk;
    this.#spare = undefined;
    this.#hasRoom(chunk, number);
    return number;
  }

  #hasRoom(chunk: Chunk, number: number): void {
    chunk.place = this.#roomy.push(number) - 1;
  }

  /** The last one takes its place. */
  #hasNoRoom(chunk: Chunk): void {
    const last = this.#roomy.pop()!;
    if (chunk.place < this.#roomy.length) {
      this.#roomy[chunk.place] = last;
      this.#chunks[last]!.place = chunk.place;
    }
    chunk.place = -1;
  }

  #emptyChunk(): Chunk {
    const bytes = Buffer.from(new ArrayBuffer(chunkRows * this.#words * 4));
    return { rows: new Int32Array(bytes.buffer), bytes, used: 0, begun: 0, free: noRow, place: -1 };
  }

  #moreRings(least: number): void {
    const heads = emptyHeads(Math.max(least, 2 * this.ringCount));
    heads.set(this.#heads);
    this.#heads = heads;
  }

  #nameIt(row: number, name: number, hash: HashKey): void {
    const { bytes } = this.#chunks[row >>> chunkBits]!;
    this.#setWord(row, at.name, name);
    bytes.write(hash, ((row & chunkMask) * this.#words + at.hash) * 4, 'latin1');
  }

  /** The word that says of which namespace a row is. One more is of this one now. */
  #nameOf(namespace: Namespace, hash: HashKey): number {
    invariant(hash.length <= hashBytes, 'rows of names: a hash of more than 32 bytes');
    return (this.#numberOf(namespace) << lengthBits) | hash.length;
  }

  /** One less is. */
  #unname(name: number): void {
    const number = name >>> lengthBits;
    const space = this.#namespaces[number]!;
    if (--space.count > 0) return;
    this.#numbers.delete(space.namespace.key);
    this.#namespaces[number] = undefined;
    this.#freeNumbers.push(number);
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
