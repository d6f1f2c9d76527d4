/**
 * What one tenant with a quota holds in one tier, coldest first, children before parents.
 *
 * The accounts of a tier share its rows, which are found by the numbers of the index's records (row-rings.ts): 66 to 71 bytes for each block,
 * of the most that there were at a time, outside of V8's heap, as a disk holds millions. Each has a ring of them: its order. Invariants: a record has a row exactly while the tier
 * lists the block and it is somebody's with a quota; its first value says whose, its second one what it takes.
 */
import type { EvictionPolicy } from '@kvtier/eviction';
import type { HashKey, Namespace } from '@kvtier/identity';
import { victimPassingOver } from '@kvtier/tiers';
import { noRow, RowRings } from './row-rings.ts';

const [owner, size] = [0, 1];

/** The blocks of one tier that somebody with a quota has. */
export class TierRows {
  readonly rows = new RowRings(2, 1);

  /** Number of the tenant who has this row. */
  ownerOf(row: number): number {
    return this.rows.value(row, owner);
  }

  /** Used now. Nothing happens when it is nobody's. */
  touch(record: number): void {
    const row = this.rows.find(record);
    if (row !== noRow) this.refresh(row);
  }

  /** The same of a row. */
  refresh(row: number): void {
    this.rows.move(this.ownerOf(row), row);
  }
}

export class Account {
  readonly bit: number;
  readonly limitBytes: number;
  /** Held. */
  bytes = 0;
  reservedBytes = 0;
  readonly #tenant: number;
  readonly #tier: TierRows;
  readonly #order: Pick<EvictionPolicy, 'name' | 'victim' | 'touch'>;

  constructor(tenant: number, bit: number, limitBytes: number, tier: TierRows) {
    this.bit = bit;
    this.limitBytes = limitBytes;
    this.#tenant = tenant;
    this.#tier = tier;
    this.#order = {
      name: 'lru',
      victim: (mayGo) => this.#firstOf(mayGo),
      touch: (row) => tier.refresh(row),
    };
  }

  /** `parent`: its record, or a negative number. */
  add(record: number, namespace: Namespace, hash: HashKey, bytes: number, parent: number): void {
    const { rows } = this.#tier;
    const row = rows.add(this.#tenant, record, namespace, hash);
    if (row === noRow) return;
    rows.setValue(row, owner, this.#tenant);
    rows.setValue(row, size, bytes);
    this.bytes += bytes;
    const above = parent >= 0 ? this.rowOf(parent) : noRow;
    if (above !== noRow && above !== row) rows.moveBefore(above, row); // a block may say that it is its own parent
  }

  /** One of its own rows. */
  remove(row: number): void {
    const { rows } = this.#tier;
    this.bytes -= rows.value(row, size);
    rows.drop(row);
  }

  /** The row of a record, if it has it; else `noRow`. */
  rowOf(record: number): number {
    const row = this.#tier.rows.find(record);
    return row !== noRow && this.#tier.ownerOf(row) === this.#tenant ? row : noRow;
  }

  /** What is pinned for long is passed over once, not with each reservation. Its row; undefined: nothing may go. */
  coldest(mayGo: (row: number) => boolean): number | undefined {
    return victimPassingOver(this.#order, { mayGo });
  }

  #firstOf(mayGo: (row: number) => boolean): number | undefined {
    const row = this.#tier.rows.firstOf(this.#tenant, mayGo);
    return row === noRow ? undefined : row;
  }
}
