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
 */
import { invariant } from '@kvtier/errors';
import { type HashQuery, type HashRows, rowWords } from './hash-rows.ts';

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

  /** Insert a row that has its hash. */
  add(row: number): void {
    if (2 * (this.#count + 1) > this.#mask + 1) this.#grow();
    if (this.#place(this.#tagOf(row), row)) this.#duplicates++;
    this.#count++;
  }

  /** Remove a row, before its hash changes. */
  remove(row: number): void {
    const tag = this.#tagOf(row);
    const slots = this.#slots;
    let found = empty;
    let others = 0;
    for (let slot = tag & this.#mask; slots[2 * slot + 1] !== empty; slot = (slot + 1) & this.#mask) {
      if (slots[2 * slot + 1] === row) found = slot;
      else if (this.#duplicates > 0 && slots[2 * slot] === tag && this.#rows.same(slots[2 * slot + 1]!, row)) others++;
      if (found !== empty && this.#duplicates === 0) break;
    }
    invariant(found !== empty, () => `hash index: row ${row} is not held under its hash`);
    if (others > 0) this.#duplicates--;
    this.#count--;
    this.#closeGap(found);
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

  /** Into the first gap from its home on; whether its hash was there already. */
  #place(tag: number, row: number): boolean {
    const slots = this.#slots;
    let isDuplicate = false;
    let slot = tag & this.#mask;
    for (; slots[2 * slot + 1] !== empty; slot = (slot + 1) & this.#mask) {
      if (slots[2 * slot] === tag && this.#rows.same(slots[2 * slot + 1]!, row)) isDuplicate = true;
    }
    slots[2 * slot] = tag;
    slots[2 * slot + 1] = row;
    return isDuplicate;
  }

  #closeGap(from: number): void {
    const slots = this.#slots;
    let gap = from;
    for (let slot = (gap + 1) & this.#mask; slots[2 * slot + 1] !== empty; slot = (slot + 1) & this.#mask) {
      // An entry may move into the gap unless its home lies behind it.
      const home = slots[2 * slot]! & this.#mask;
      if (((slot - home) & this.#mask) < ((slot - gap) & this.#mask)) continue;
      slots[2 * gap] = slots[2 * slot]!;
      slots[2 * gap + 1] = slots[2 * slot + 1]!;
      gap = slot;
    }
    slots[2 * gap + 1] = empty;
  }

  #grow(): void {
    const slots = this.#slots;
    const before = this.#mask + 1;
    this.#mask = 2 * before - 1;
    this.#slots = emptySlots(2 * before);
    // From a gap on, so that entries that wrapped around the end keep their order.
    let start = 0;
    while (slots[2 * start + 1] !== empty) start++;
    for (let i = 0; i < before; i++) {
      const slot = (start + i) & (before - 1);
      if (slots[2 * slot + 1] !== empty) this.#place(slots[2 * slot]!, slots[2 * slot + 1]!);
    }
  }
}

function emptySlots(count: number): Int32Array {
  return new Int32Array(2 * count).fill(empty);
}
