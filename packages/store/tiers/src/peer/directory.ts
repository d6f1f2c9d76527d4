/**
 * Which peer holds which block, in memory: what makes a lookup ask nobody. A block's entry has two bits a peer (its arena, what is
 * below). Invariants: a block without a holder has no entry; at most `maxBlocks` entries, what goes beyond is left out and
 * counted; who is going (`drop`) counts as a holder of nothing from that moment on, though its entries go slice by slice.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import { type Page, pagesOfRows, type Rows } from '../kit/followers.ts';
import { slicing } from '../kit/slices.ts';
import { HolderTable, holderWords, noRow } from './holder-table.ts';

/** Peers in one word of holders: two bits each. */
const perWord = 16;
export const maxPeers = holderWords * perWord;
/** Namespaces that peers may name at a time; blocks of others are left out. */
const maxNamespaces = 1 << 16;

interface Space {
  readonly namespace: Namespace;
  readonly number: number;
  count: number;
}

/** Bits of one peer: its arena's, that of what is below, or both. */
export interface PeerBits {
  readonly word: number;
  readonly mask: number;
}

const tables = [1, 2, 3].map((bits) =>
  Array.from({ length: maxPeers }, (_, peer): PeerBits => {
    return Object.freeze({ word: Math.floor(peer / perWord), mask: bits << ((peer % perWord) * 2) });
  }),
);
export const bitOf = (peer: number, tier: 0 | 1): PeerBits => tables[tier]![peer]!;
export const bitsOf = (peer: number): PeerBits => tables[2]![peer]!;

/** Peers, by their bits. */
export class PeerSet {
  readonly words = new Int32Array(holderWords);

  get isEmpty(): boolean {
    return this.words.every((word) => word === 0);
  }

  has({ word, mask }: PeerBits): boolean {
    return (this.words[word]! & mask) !== 0;
  }

  add({ word, mask }: PeerBits): void {
    this.words[word]! |= mask;
  }

  remove({ word, mask }: PeerBits): void {
    this.words[word]! &= ~mask;
  }
}

export class PeerDirectory implements Rows {
  readonly #table = new HolderTable();
  readonly #spaces = new Map<string, Space>();
  readonly #byNumber: (Space | undefined)[] = [];
  readonly #freeNumbers: number[] = [];
  readonly #maxBlocks: number;
  /** Bits of who is going, by drop: what is dropped once more before it has gone is gone after the later one. */
  readonly #drops = new Set<{ readonly bits: PeerBits }>();
  readonly #going = new PeerSet();
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
    return this.#table.isListed(row) ? this.#byNumber[this.#table.namespace(row)]!.namespace : undefined;
  }

  hashOfRow(row: number): HashKey {
    return this.#table.hash(row);
  }

  /** Who holds it, into `found`, which is returned: a table of all blocks is asked often, and sets would be garbage. */
  holders(namespace: Namespace, hash: HashKey, found = new PeerSet()): PeerSet {
    const row = this.#find(namespace, hash);
    for (let word = 0; word < holderWords; word++)
      found.words[word] = row === noRow ? 0 : this.#table.holders(row, word) & ~this.#going.words[word]!;
    return found;
  }

  /** Whether the peer of these bits does. */
  holds(namespace: Namespace, hash: HashKey, bits: PeerBits): boolean {
    const row = this.#find(namespace, hash);
    return row !== noRow && (this.#table.holders(row, bits.word) & bits.mask & ~this.#going.words[bits.word]!) !== 0;
  }

  /** Blocks that have an entry, from the first hash on. */
  lookup(namespace: Namespace, hashes: readonly HashKey[]): number {
    let held = 0;
    while (held < hashes.length && this.#find(namespace, hashes[held]!) !== noRow) held++;
    return held;
  }

  /** Returns the blocks that had no entry before. */
  add(namespace: Namespace, hashes: readonly HashKey[], bits: PeerBits): HashKey[] {
    invariant(!this.#going.has(bits), 'peer directory: who is going holds something');
    if (hashes.length === 0) return [];
    const space = this.#spaceOf(namespace);
    if (space === undefined) {
      this.leftOut += hashes.length;
      return [];
    }
    const added: HashKey[] = [];
    for (const hash of hashes) {
      const hasRoom = this.#table.count < this.#maxBlocks;
      if (this.#table.add(space.number, hash, bits.word, bits.mask, hasRoom)) continue;
      if (!hasRoom) this.leftOut++;
      else {
        space.count++;
        added.push(hash);
      }
    }
    this.#dropIfEmpty(space);
    return added;
  }

  /** Returns the blocks that have no entry any more. Without `bits` nobody holds them. */
  remove(namespace: Namespace, hashes: readonly HashKey[], bits?: PeerBits): HashKey[] {
    const space = this.#spaces.get(namespace.key);
    if (space === undefined) return [];
    const gone = hashes.filter((hash) => {
      const row = this.#table.find(space.number, hash);
      if (row === noRow) return false;
      if (bits !== undefined) return this.#clear(row, bits);
      for (let word = 0; word < holderWords; word++) if (this.#clear(row, { word, mask: -1 })) return true;
      return false;
    });
    this.#dropIfEmpty(space);
    return gone;
  }

  /**
   * They hold nothing from now on. Each call of what it returns takes them out of some entries and returns the blocks whose entries
   * went with that; undefined: they are out. Until then nothing may be added for them.
   */
  drop(bits: PeerBits): () => Page[] | undefined {
    const drop = { bits };
    this.#drops.add(drop);
    this.#going.add(bits);
    let row = 0;
    return () => {
      if (!this.#drops.has(drop)) return undefined;
      if (row >= this.#table.rowCount) {
        this.#drops.delete(drop);
        this.#going.words.fill(0);
        for (const other of this.#drops) this.#going.add(other.bits);
        return undefined;
      }
      const gone = new Map<number, HashKey[]>();
      let looked = 0;
      for (let left = slicing.blocks; left > 0 && row < this.#table.rowCount && looked < 16 * slicing.blocks; row++) {
        looked++;
        if ((this.#table.holders(row, bits.word) & bits.mask) === 0) continue;
        left--;
        const number = this.#table.namespace(row);
        const hash = this.#holdsAlone(row, bits) ? this.#table.hash(row) : undefined;
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
    this.#going.words.fill(0);
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
  #clear(row: number, { word, mask }: PeerBits): boolean {
    const before = this.#table.holders(row, word);
    const after = before & ~mask;
    if (after === before) return false;
    const number = this.#table.namespace(row);
    const isGone = this.#table.setHolders(row, word, after);
    if (isGone) this.#byNumber[number]!.count--;
    return isGone;
  }

  #holdsAlone(row: number, bits: PeerBits): boolean {
    for (let word = 0; word < holderWords; word++) {
      const mask = word === bits.word ? bits.mask : 0;
      if ((this.#table.holders(row, word) & ~mask) !== 0) return false;
    }
    return true;
  }

  #dropIfEmpty({ namespace, number, count }: Space): void {
    if (count > 0) return;
    this.#spaces.delete(namespace.key);
    this.#byNumber[number] = undefined;
    this.#freeNumbers.push(number);
  }
}
