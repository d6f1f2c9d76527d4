/**
 * Which block holds a hash: an open-addressed table, linear probing, in parallel arrays (V8's Map costs four times as much
 * here, most of it in deletions). Nearly always one block; two requests that compute the same block at the same time
 * keep both (tables are append-only, so neither can be replaced), and then the first inserted survivor answers.
 *
 *     home of a hash: its last four bytes       [ … | A  B  A' | … ]    A' was inserted after A under the same hash
 *
 * Invariant: from its home to an entry there is no gap, and entries of one home lie in order of insertion: an insertion goes
 * into the first gap, a removal closes its gap with what comes after (Knuth's algorithm R). Semantics after vLLM's
 * BlockHashToBlockMap.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';

const empty = -1;
const minSlots = 64;

export class HashIndex {
  #blocks: Int32Array = new Int32Array(minSlots).fill(empty);
  #tags: Int32Array = new Int32Array(minSlots);
  #keys: (HashKey | undefined)[] = new Array<HashKey | undefined>(minSlots).fill(undefined);
  #mask = minSlots - 1;
  #count = 0;
  /** Entries whose hash another entry before them has, too. */
  #duplicates = 0;

  /** Distinct hashes. */
  get keyCount(): number {
    return this.#count - this.#duplicates;
  }

  get(hash: HashKey): number | undefined {
    const slot = this.#find(hash, tagOf(hash));
    return slot === empty ? undefined : this.#blocks[slot];
  }

  add(hash: HashKey, block: number): void {
    if (2 * (this.#count + 1) > this.#blocks.length) this.#grow();
    const tag = tagOf(hash);
    if (this.#place(hash, tag, block)) this.#duplicates++;
    this.#count++;
  }

  remove(hash: HashKey, block: number): void {
    const tag = tagOf(hash);
    let slot = this.#find(hash, tag);
    let others = 0;
    while (slot !== empty && this.#blocks[slot] !== block) {
      others++;
      slot = this.#findFrom((slot + 1) & this.#mask, hash, tag);
    }
    invariant(slot !== empty, () => `hash index: block ${block} is not held under its hash`);
    if (this.#duplicates > 0 && (others > 0 || this.#findFrom((slot + 1) & this.#mask, hash, tag) !== empty)) {
      this.#duplicates--;
    }
    this.#count--;
    this.#closeGap(slot);
  }

  clear(): void {
    this.#blocks.fill(empty);
    this.#keys.fill(undefined);
    this.#count = 0;
    this.#duplicates = 0;
  }

  /** Every (hash, block) pair. For integrity checks. */
  *entries(): Generator<readonly [HashKey, number]> {
    for (let slot = 0; slot < this.#blocks.length; slot++) {
      if (this.#blocks[slot] !== empty) yield [this.#keys[slot]!, this.#blocks[slot]!];
    }
  }

  checkIntegrity(): void {
    let count = 0;
    const seen = new Set<HashKey>();
    for (let slot = 0; slot < this.#blocks.length; slot++) {
      const key = this.#keys[slot];
      invariant((key === undefined) === (this.#blocks[slot] === empty), 'hash index: a slot is half empty');
      if (key === undefined) continue;
      count++;
      seen.add(key);
      invariant(this.#tags[slot] === tagOf(key), 'hash index: a tag is not that of its hash');
      for (let at = this.#tags[slot]! & this.#mask; at !== slot; at = (at + 1) & this.#mask) {
        invariant(this.#blocks[at] !== empty, 'hash index: a gap before an entry');
      }
    }
    invariant(count === this.#count && seen.size === this.keyCount, 'hash index: miscounted');
  }

  #find(hash: HashKey, tag: number): number {
    return this.#findFrom(tag & this.#mask, hash, tag);
  }

  /** The first slot of this hash from `slot` on, before a gap; or `empty`. */
  #findFrom(from: number, hash: HashKey, tag: number): number {
    for (let slot = from; this.#blocks[slot] !== empty; slot = (slot + 1) & this.#mask) {
      if (this.#tags[slot] === tag && this.#keys[slot] === hash) return slot;
    }
    return empty;
  }

  /** Into the first gap from its home on; whether its hash was there already. */
  #place(hash: HashKey, tag: number, block: number): boolean {
    let isDuplicate = false;
    let slot = tag & this.#mask;
    for (; this.#blocks[slot] !== empty; slot = (slot + 1) & this.#mask) {
      if (this.#tags[slot] === tag && this.#keys[slot] === hash) isDuplicate = true;
    }
    this.#blocks[slot] = block;
    this.#tags[slot] = tag;
    this.#keys[slot] = hash;
    return isDuplicate;
  }

  #closeGap(from: number): void {
    let gap = from;
    for (let slot = (gap + 1) & this.#mask; this.#blocks[slot] !== empty; slot = (slot + 1) & this.#mask) {
      // An entry may move into the gap unless its home lies behind it.
      const home = this.#tags[slot]! & this.#mask;
      if (((slot - home) & this.#mask) < ((slot - gap) & this.#mask)) continue;
      this.#blocks[gap] = this.#blocks[slot]!;
      this.#tags[gap] = this.#tags[slot]!;
      this.#keys[gap] = this.#keys[slot];
      gap = slot;
    }
    this.#blocks[gap] = empty;
    this.#keys[gap] = undefined;
  }

  #grow(): void {
    const blocks = this.#blocks;
    const tags = this.#tags;
    const keys = this.#keys;
    const length = blocks.length * 2;
    this.#mask = length - 1;
    this.#blocks = new Int32Array(length).fill(empty);
    this.#tags = new Int32Array(length);
    this.#keys = new Array<HashKey | undefined>(length).fill(undefined);
    // From a gap on, so that entries that wrapped around the end keep their order.
    const start = blocks.indexOf(empty);
    for (let i = 0; i < blocks.length; i++) {
      const slot = (start + i) & (blocks.length - 1);
      if (blocks[slot] !== empty) this.#place(keys[slot]!, tags[slot]!, blocks[slot]!);
    }
  }
}

/** 32 bits of a hash. */
function tagOf(hash: HashKey): number {
  const end = hash.length;
  return (
    hash.charCodeAt(end - 1) |
    (hash.charCodeAt(end - 2) << 8) |
    (hash.charCodeAt(end - 3) << 16) |
    (hash.charCodeAt(end - 4) << 24)
  );
}
