/**
 * Which peer holds which block, in memory: what makes a lookup ask nobody. A block's entry has two bits a peer (its arena, what is
 * below). Invariants: a block without a holder has no entry; at most `maxBlocks` entries, what goes beyond is left out and
 * counted; who is going (`drop`) counts as a holder of nothing from that moment on, though its entries go slice by slice.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import { type Page, pagesOfRows, type Rows } from '../kit/followers.ts';
import { slicing } from '../kit/slices.ts';
import { HolderTable, noRow } from './holder-table.ts';

/** Two bits each in a 32-bit number. */
export const maxPeers = 16;
/** Namespaces that peers may name at a time; blocks of others are left out. */
const maxNamespaces = 1 << 16;

interface Space {
  readonly namespace: Namespace;
  readonly number: number;
  count: number;
}

export const bitOf = (peer: number, tier: 0 | 1): number => 1 << (peer * 2 + tier);
export const bitsOf = (peer: number): number => 3 << (peer * 2);

export class PeerDirectory implements Rows {
  readonly #table = new HolderTable();
  readonly #spaces = new Map<string, Space>();
  readonly #byNumber: (Space | undefined)[] = [];
  readonly #freeNumbers: number[] = [];
  readonly #maxBlocks: number;
  /** Bits of who is going, by drop: what is dropped once more before it has gone is gone after the later one. */
  readonly #drops = new Set<{ readonly bits: number }>();
  #going = 0;
  /** Blocks that did not fit. */
  leftOut = 0;

  constructor(maxBlocks: number) {
    this.#maxBlocks = maxBlocks;
  }

  /** Blocks that have an entry. */
  get count(): number {
    return this.#table.count;
  }

  /** Bytes of memory. */
  get bytes(): number {
    return this.#table.bytes;
  }

  get rowCount(): number {
    return this.#table.rowCount;
  }

  namespaceOfRow(row: number): Namespace | undefined {
    return this.#table.holders(row) === 0 ? undefined : this.#byNumber[this.#table.namespace(row)]!.namespace;
  }

  hashOfRow(row: number): HashKey {
    return this.#table.hash(row);
  }

  /** Bits of who holds it; 0: nobody. */
  holders(namespace: Namespace, hash: HashKey): number {
    const row = this.#find(namespace, hash);
    return row === noRow ? 0 : this.#table.holders(row) & ~this.#going;
  }

  /** Blocks that have an entry, from the first hash on. */
  lookup(namespace: Namespace, hashes: readonly HashKey[]): number {
    let held = 0;
    while (held < hashes.length && this.#find(namespace, hashes[held]!) !== noRow) held++;
    return held;
  }

  /** Returns the blocks that had no entry before. */
  add(namespace: Namespace, hashes: readonly HashKey[], bits: number): HashKey[] {
    invariant((bits & this.#going) === 0, 'peer directory: who is going holds something');
    if (hashes.length === 0) return [];
    const space = this.#spaceOf(namespace);
    if (space === undefined) {
      this.leftOut += hashes.length;
      return [];
    }
    const added: HashKey[] = [];
    for (const hash of hashes) {
      const hasRoom = this.#table.count < this.#maxBlocks;
      if (this.#table.add(space.number, hash, bits, hasRoom) !== 0) continue;
      if (!hasRoom) this.leftOut++;
      else {
        space.count++;
        added.push(hash);
      }
    }
    this.#dropIfEmpty(space);
    return added;
  }

  /** Returns the blocks that have no entry any more. */
  remove(namespace: Namespace, hashes: readonly HashKey[], bits: number): HashKey[] {
    const space = this.#spaces.get(namespace.key);
    if (space === undefined) return [];
    const gone = hashes.filter((hash) => {
      const row = this.#table.find(space.number, hash);
      return row !== noRow && this.#clear(row, bits);
    });
    this.#dropIfEmpty(space);
    return gone;
  }

  /**
   * They hold nothing from now on. Each call of what it returns takes them out of some entries and returns the blocks whose entries
   * went with that; undefined: they are out. Until then nothing may be added for them.
   */
  drop(bits: number): () => Page[] | undefined {
    const drop = { bits };
    this.#drops.add(drop);
    this.#going |= bits;
    let row = 0;
    return () => {
      if (!this.#drops.has(drop)) return undefined;
      if (row >= this.#table.rowCount) {
        this.#drops.delete(drop);
        this.#going = 0;
        for (const other of this.#drops) this.#going |= other.bits;
        return undefined;
      }
      const gone = new Map<number, HashKey[]>();
      let looked = 0;
      for (let left = slicing.blocks; left > 0 && row < this.#table.rowCount && looked < 16 * slicing.blocks; row++) {
        looked++;
        const holders = this.#table.holders(row);
        if ((holders & bits) === 0) continue;
        left--;
        const number = this.#table.namespace(row);
        const hash = (holders & ~bits) === 0 ? this.#table.hash(row) : undefined;
        this.#clear(row, bits);
        if (hash === undefined) continue;
        const hashes = gone.get(number);
        if (hashes === undefined) gone.set(number, [hash]);
        else hashes.push(hash);
      }
      return [...gone].map(([number, hashes]) => {
        const space = this.#byNumber[number]!;
        this.#dropIfEmpty(space);
        return [space.namespace, hashes] as const;
      });
    };
  }

  /** Nobody holds anything: at once, and without saying what it was. */
  dropAll(): void {
    this.#table.clear();
    this.#spaces.clear();
    this.#byNumber.length = 0;
    this.#freeNumbers.length = 0;
    this.#drops.clear();
    this.#going = 0;
  }

  *all(): Generator<Page, void> {
    for (const page of pagesOfRows(this)) if (page !== undefined) yield page;
  }

  checkIntegrity(): void {
    this.#table.checkIntegrity();
    let count = 0;
    for (const space of this.#spaces.values()) {
      invariant(space.count > 0, 'peer directory: an empty namespace');
      invariant(this.#byNumber[space.number] === space, 'peer directory: a namespace has a wrong number');
      count += space.count;
    }
    invariant(count === this.count && count <= this.#maxBlocks, 'peer directory: the count is wrong');
  }

  #find(namespace: Namespace, hash: HashKey): number {
    const space = this.#spaces.get(namespace.key);
    return space === undefined ? noRow : this.#table.find(space.number, hash);
  }

  #spaceOf(namespace: Namespace): Space | undefined {
    const known = this.#spaces.get(namespace.key);
    if (known !== undefined || this.#spaces.size >= maxNamespaces) return known;
    const number = this.#freeNumbers.pop() ?? this.#byNumber.length;
    const space = { namespace, number, count: 0 };
    this.#byNumber[number] = space;
    this.#spaces.set(namespace.key, space);
    return space;
  }

  /** Returns whether the entry went. */
  #clear(row: number, bits: number): boolean {
    const before = this.#table.holders(row);
    const after = before & ~bits;
    if (after === before) return false;
    if (after === 0) this.#byNumber[this.#table.namespace(row)]!.count--;
    this.#table.setHolders(row, after);
    return after === 0;
  }

  #dropIfEmpty({ namespace, number, count }: Space): void {
    if (count > 0) return;
    this.#spaces.delete(namespace.key);
    this.#byNumber[number] = undefined;
    this.#freeNumbers.push(number);
  }
}
