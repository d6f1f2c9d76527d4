/**
 * Which block holds a hash: an open-addressed table of rows (hash-rows.ts), linear probing, tag and row side by side. Nearly
 * always one block holds a hash; two requests that compute the same block at the same time keep both (tables are
 * append-only, so neither can be replaced), and then the first inserted survivor answers.
 *
 *     home of a hash: its first word       [ … | A  B  A' | … ]    A' was inserted after A under the same hash
 *
 * Invariant: from its home to an entry there is no gap, and entries of one home lie in order of insertion: an insertion goes
 * into the first gap, a removal closes its gap with what comes after (Knuth's algorithm R). Semantics after vLLM's
 * BlockHashToBlockMap.
 *
 * A hash's home is a random place in a table of megabytes, and what is found there decides what a removal does next, so a CPU
 * would wait for one cache miss after the other. Removals read all their homes first, which lets the misses overlap: a fifth to a
 * quarter less time for 16 to 128 rows that are in no cache. Insertions gain nothing by it.
 */
import { InvariantError, invariant } from '@kvtier/errors';
import { type HashQuery, type HashRows, rowWords } from './hash-rows.ts';
import type { BlockHashes } from './request.ts';

const empty = -1;
const minSlots = 64;

export class HashIndex {
  readonly #rows: HashRows;
  /** Tag and row of each slot. */
  #slots: Int32Array = emptySlots(minSlots);
  #mask = minSlots - 1;
  #count = 0;
  /** Entries whose hash another entry has, too, beyond one each. */
  #duplicates = 0;

  constructor(rows: HashRows) {
    this.#rows = rows;
  }

  /** Distinct hashes. */
  get keyCount(): number {
    return this.#count - this.#duplicates;
  }

  /** The row of this hash that was inserted first. */
  find(query: HashQuery): number | undefined {
    const tag = query.words[query.at]! | 0;
    const slots = this.#slots;
    const mask = this.#mask;
    for (let slot = tag & mask; ; slot = (slot + 1) & mask) {
      const row = slots[2 * slot + 1]!;
      if (row === empty) return undefined;
      if (slots[2 * slot] === tag && this.#rows.equals(row, query)) return row;
    }
  }

  /** `find` along a chain, up to the first miss: block i has the hash at (i + 1) × hashesPerBlock - 1. At most `count`. */
  findRun(hashes: BlockHashes, hashesPerBlock: number, count: number): number[] {
    const found: number[] = [];
    for (let i = 0; i < count; i++) {
      const row = this.find(this.#rows.query(hashes, (i + 1) * hashesPerBlock - 1));
      if (row === undefined) break;
      found.push(row);
    }
    return found;
  }

  /** Insert rows that have their hashes, in this order. */
  add(rows: readonly number[]): void {
    while (2 * (this.#count + rows.length) > this.#mask + 1) this.#grow();
    this.#insert(rows);
    this.#count += rows.length;
  }

  /** Remove rows, before their hashes change. */
  remove(rows: readonly number[]): void {
    this.#readAhead(rows);
    const slots = this.#slots;
    const mask = this.#mask;
    const { words } = this.#rows;
    for (let i = 0; i < rows.length; i++) {
      const row = rows[i]!;
      let gap = words[row * rowWords]! & mask;
      while (slots[2 * gap + 1] !== row) {
        if (slots[2 * gap + 1] === empty) throw notHeld(row);
        gap = (gap + 1) & mask;
      }
      if (this.#duplicates > 0 && this.#hasOther(row)) this.#duplicates--;
      let slot = (gap + 1) & mask;
      for (let next = slots[2 * slot + 1]!; next !== empty; next = slots[2 * slot + 1]!) {
        const tag = slots[2 * slot]!;
        // An entry may move into the gap unless its home lies behind it.
        if (((slot - tag) & mask) >= ((slot - gap) & mask)) {
          slots[2 * gap] = tag;
          slots[2 * gap + 1] = next;
          gap = slot;
        }
        slot = (slot + 1) & mask;
      }
      slots[2 * gap + 1] = empty;
    }
    this.#count -= rows.length;
  }

  clear(): void {
    this.#slots.fill(empty);
    this.#count = 0;
    this.#duplicates = 0;
  }

  /** Every row. For integrity checks. */
  *rows(): Generator<number> {
    for (let slot = 0; slot <= this.#mask; slot++) {
      const row = this.#slots[2 * slot + 1]!;
      if (row !== empty) yield row;
    }
  }

  checkIntegrity(): void {
    const seen = new Set<string>();
    let count = 0;
    for (let slot = 0; slot <= this.#mask; slot++) {
      const row = this.#slots[2 * slot + 1]!;
      if (row === empty) continue;
      count++;
      const key = this.#rows.contentOf(row);
      invariant(key !== undefined, () => `hash index: row ${row} has no hash`);
      seen.add(key);
      const tag = this.#slots[2 * slot]!;
      invariant(tag === this.#tagOf(row), 'hash index: a tag is not that of its hash');
      for (let at = tag & this.#mask; at !== slot; at = (at + 1) & this.#mask) {
        invariant(this.#slots[2 * at + 1] !== empty, 'hash index: a gap before an entry');
      }
    }
    invariant(count === this.#count && seen.size === this.keyCount, 'hash index: miscounted');
  }

  #tagOf(row: number): number {
    return this.#rows.words[row * rowWords]! | 0;
  }

  /** Looks at where each row's search begins, which is no empty place: so memory brings all of them at the same time. */
  #readAhead(rows: readonly number[]): void {
    const slots = this.#slots;
    const mask = this.#mask;
    const { words } = this.#rows;
    for (let i = 0; i < rows.length; i++) {
      const row = rows[i]!;
      if (slots[2 * (words[row * rowWords]! & mask) + 1] === empty) throw notHeld(row);
    }
  }

  /** Another entry has the same hash. */
  #hasOther(row: number): boolean {
    const slots = this.#slots;
    const tag = this.#tagOf(row);
    for (let slot = tag & this.#mask; slots[2 * slot + 1] !== empty; slot = (slot + 1) & this.#mask) {
      const other = slots[2 * slot + 1]!;
      if (other !== row && slots[2 * slot] === tag && this.#rows.same(other, row)) return true;
    }
    return false;
  }

  /** Each into the first gap from its home on. */
  #insert(rows: readonly number[]): void {
    const slots = this.#slots;
    const mask = this.#mask;
    const { words } = this.#rows;
    for (let i = 0; i < rows.length; i++) {
      const row = rows[i]!;
      const tag = words[row * rowWords]! | 0;
      let isDuplicate = false;
      let slot = tag & mask;
      for (let held = slots[2 * slot + 1]!; held !== empty; held = slots[2 * slot + 1]!) {
        if (slots[2 * slot] === tag && this.#rows.same(held, row)) isDuplicate = true;
        slot = (slot + 1) & mask;
      }
      slots[2 * slot] = tag;
      slots[2 * slot + 1] = row;
      if (isDuplicate) this.#duplicates++;
    }
  }

  #grow(): void {
    const slots = this.#slots;
    const before = this.#mask + 1;
    this.#mask = 2 * before - 1;
    this.#slots = emptySlots(2 * before);
    this.#duplicates = 0;
    // From a gap on, so that entries that wrapped around the end keep their order.
    let start = 0;
    while (slots[2 * start + 1] !== empty) start++;
    const rows: number[] = [];
    for (let i = 0; i < before; i++) {
      const row = slots[2 * ((start + i) & (before - 1)) + 1]!;
      if (row !== empty) rows.push(row);
    }
    this.#insert(rows);
  }
}

function notHeld(row: number): InvariantError {
  return new InvariantError(`hash index: row ${row} is not held under its hash`);
}

function emptySlots(count: number): Int32Array {
  return new Int32Array(2 * count).fill(empty);
}
