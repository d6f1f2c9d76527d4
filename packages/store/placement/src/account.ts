/**
 * What one tenant with a quota holds in one tier, coldest first, children before parents.
 *
 * The accounts of a tier share its rows, which are found by the numbers of the index's records (row-rings.ts): 66 to 71 bytes for each block,
 * outside of V8's heap, as a disk holds millions. Each has a ring of them: its order. Invariants: a record has a row exactly while the tier
 * lists the block and it is somebody's with a quota; its first value says whose, its second one what it takes.
 */
import type { EvictionPolicy } from '@kvtier/eviction';
import type { HashKey, Namespace } from '@kvtier/identity';
import { victimPassingOver } from '@kvtier/tiers';
import { RowRings } from './row-rings.ts';

const [owner, size] = [0, 1];

/** The blocks of one tier that somebody with a quota has. */
export class TierRows {
  readonly rows = new RowRings(2, 1);

  /** Number of the tenant who has this record here; 0: nobody with a quota. */
  ownerOf(record: number): number {
    return this.rows.has(record) ? this.rows.value(record, owner) : 0;
  }

  /** Used now. Nothing happens when it is nobody's. */
  touch(record: number): void {
    const { rows } = this;
    if (!rows.has(record)) return;
    rows.move(rows.value(record, owner), record);
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
      touch: (record) => tier.touch(record),
    };
  }

  /** `parent`: its record, or a negative number. */
  add(record: number, namespace: Namespace, hash: HashKey, bytes: number, parent: number): void {
    const { rows } = this.#tier;
    if (rows.has(record)) return;
    const isBesideParent = parent >= 0 && this.has(parent); // not where a block says that it is its own
    rows.add(this.#tenant, record, namespace, hash);
    rows.setValue(record, owner, this.#tenant);
    rows.setValue(record, size, bytes);
    this.bytes += bytes;
    if (isBesideParent) rows.moveBefore(parent, record);
  }

  /** One of its own. */
  remove(record: number): void {
    const { rows } = this.#tier;
    this.bytes -= rows.value(record, size);
    rows.delete(record);
  }

  has(record: number): boolean {
    return this.#tier.ownerOf(record) === this.#tenant;
  }

  /** What is pinned for long is passed over once, not with each reservation. Its record; undefined: nothing may go. */
  coldest(mayGo: (record: number) => boolean): number | undefined {
    return victimPassingOver(this.#order, { mayGo });
  }

  #firstOf(mayGo: (record: number) => boolean): number | undefined {
    const record = this.#tier.rows.firstOf(this.#tenant, mayGo);
    return record < 0 ? undefined : record;
  }
}
