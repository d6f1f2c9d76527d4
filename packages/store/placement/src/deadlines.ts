/**
 * Blocks by the second at which they end: a hierarchical timing wheel (Varghese and Lauck), by the numbers of the caller's records.
 *
 *     level 0: seconds │ level 1: 64 s each │ level 2: 4096 s each │ …   a row stands where its second first differs from now
 *     each slot is a ring of rows (row-rings.ts)
 *
 * Invariants: 62 to 67 bytes of memory for each block, of the most that there were at a time, whatever has passed through; what has gone
 * gives them back in chunks (row-rings.ts). Setting and deleting touch one row and its two neighbours. `take` does at most so many steps as
 * it was told, so that no turn pays for a slot in which a million rows lie. Time never goes back.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import { noRow, RowRings } from './row-rings.ts';

/** The value of a row. */
const second = 0;
const digitBits = 6;
const digits = 1 << digitBits;
const digitMask = digits - 1;
const levels = Math.ceil(32 / digitBits);
/** Rings beside those of the slots. */
const due = levels * digits;
/** Of a slot whose time has come: rows are taken out of it one by one. */
const moving = due + 1;

export class Deadlines {
  readonly #rows = new RowRings(1, moving + 1);
  /** The second up to which slots were emptied. */
  #nowS: number;

  constructor(nowS: number) {
    this.#nowS = nowS;
  }

  get count(): number {
    return this.#rows.count;
  }

  get bytes(): number {
    return this.#rows.bytes;
  }

  /** The record's block ends at `endS` (below 2^32), not when it was set to before. It is `nowS`. */
  set(record: number, namespace: Namespace, hash: HashKey, endS: number, nowS: number): void {
    const rows = this.#rows;
    if (rows.count === 0) this.#nowS = Math.max(this.#nowS, nowS); // nothing stands anywhere
    const ring = this.#ringOf(endS);
    let row = rows.find(record);
    if (row === noRow) row = rows.add(ring, record, namespace, hash);
    else {
      rows.rename(row, namespace, hash);
      rows.move(ring, row);
    }
    rows.setValue(row, second, endS);
  }

  /** Nothing happens when it is not set. */
  delete(record: number): void {
    const row = this.#rows.find(record);
    if (row !== noRow) this.#rows.drop(row);
  }

  clear(): void {
    this.#rows.clear();
  }

  /** When `take` has something to do next; `Infinity`: nothing is set. Not later than the earliest end. */
  get nextS(): number {
    if (!this.#rows.isEmpty(due) || !this.#rows.isEmpty(moving)) return this.#nowS;
    return this.#nextSlot()?.second ?? Number.POSITIVE_INFINITY;
  }

  /** Up to `count` blocks that have ended by `nowS`, by namespace; they are not set any more. At most `steps` rows are touched. */
  take(nowS: number, count: number, steps: number): Map<Namespace, HashKey[]> {
    const rows = this.#rows;
    const ended = new Map<Namespace, HashKey[]>();
    let left = count;
    for (let step = 0; step < steps && left > 0; step++) {
      const first = rows.firstOf(due);
      if (first >= 0) {
        this.#name(first, ended);
        rows.drop(first);
        left--;
        continue;
      }
      const moved = rows.firstOf(moving);
      if (moved >= 0) {
        rows.move(this.#ringOf(rows.value(moved, second)), moved);
        continue;
      }
      const slot = this.#nextSlot();
      if (slot === undefined || slot.second > nowS) {
        this.#nowS = Math.max(this.#nowS, nowS);
        break;
      }
      this.#nowS = slot.second;
      rows.moveAll(slot.ring, moving);
    }
    return ended;
  }

  /** Throws InvariantError unless every row stands in the ring where it belongs. */
  checkIntegrity(): void {
    this.#rows.checkIntegrity((ring, row) => {
      const belongs = ring === moving || ring === this.#ringOf(this.#rows.value(row, second));
      invariant(belongs, 'deadlines: a row stands in a wrong ring');
    });
  }

  #name(row: number, ended: Map<Namespace, HashKey[]>): void {
    const namespace = this.#rows.namespaceOf(row);
    const hash = this.#rows.hashOf(row);
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
        if (this.#rows.isEmpty(ring)) continue;
        const above = shift + digitBits >= 32 ? 0 : (this.#nowS >>> (shift + digitBits)) << (shift + digitBits);
        return { ring, second: (above | (digit << shift)) >>> 0 };
      }
    }
    return undefined;
  }

  #ringOf(endS: number): number {
    if (endS <= this.#nowS) return due;
    const level = Math.floor((31 - Math.clz32(endS ^ this.#nowS)) / digitBits);
    return level * digits + ((endS >>> (level * digitBits)) & digitMask);
  }
}
