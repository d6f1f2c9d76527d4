/**
 * 64-bit block hashes → record numbers, in typed arrays.
 *
 *     hash (low, high) ──▶ shard (top bits of the mix) ──▶ slot, linear probing ──▶ record number
 *     records, in chunks of 4,096, 20 bytes each:  [ low | high | run | place | fold ]
 *     slots, 4 bytes each:                         [ tag: 6 bits of the mix | record + 1 ], 0 where free
 *
 * Shards grow alone, by half, so that no insertion pays for the whole table; deletion shifts back, so there are no
 * tombstones (Knuth 6.4 R). Of a table larger than caches, every record that is looked at is waited for: by its tag a slot tells which
 * records are another hash's (after the SwissTable of Abseil), so that a look-up waits for one slot and one record.
 */
import type { Keys } from './keys.ts';

const shardBits = 8;
const shardCount = 1 << shardBits;
const firstSlots = 16;
const chunkBits = 12;
const chunkRecords = 1 << chunkBits;
const chunkMask = chunkRecords - 1;
const words = 5;
const slotBytes = 4;
const recordBits = 26;
const recordMask = (1 << recordBits) - 1;
/** Slots name no more. */
export const mostRecords = recordMask - 1;
const chunkBytes = chunkRecords * words * 4;
/** Of one that holds nothing. */
export const emptyTableBytes = shardCount * firstSlots * slotBytes;
const runAt = 2;
const placeAt = 3;
const foldAt = 4;

export const none = -1;

interface Shard {
  slots: Int32Array;
  count: number;
}

export class HashTable {
  readonly #shards: Shard[] = Array.from({ length: shardCount }, () => ({
    slots: new Int32Array(firstSlots),
    count: 0,
  }));
  readonly #chunks: Int32Array[] = [];
  /** The caller makes room before it inserts more. */
  maxRecords: number;
  #free = none;
  /** Records that were ever used. */
  #used = 0;
  #count = 0;
  #slots = shardCount * firstSlots;
  /** Of no use, but that `fetch` writes it: what is read for nothing, the compiler leaves out. */
  fetched = 0;

  constructor(maxRecords: number) {
    this.maxRecords = maxRecords;
  }

  get count(): number {
    return this.#count;
  }

  /** Record numbers are below this; those that were given back among them. */
  get used(): number {
    return this.#used;
  }

  /** Memory. */
  get bytes(): number {
    return this.#chunks.length * chunkBytes + this.#slots * slotBytes;
  }

  /** How much more it is after this insertion. */
  growthFor(low: number, high: number): number {
    const { slots, count } = this.#shards[mix(low, high) >>> (32 - shardBits)]!;
    const grown = isFull(count, slots) ? slots.length >>> 1 : 0;
    const isChunk = this.#free === none && this.#used === this.#chunks.length * chunkRecords;
    return grown * slotBytes + (isChunk ? chunkBytes : 0);
  }

  /** The record of a hash, or `none`. */
  find(low: number, high: number): number {
    const h = mix(low, high);
    const { slots } = this.#shards[h >>> (32 - shardBits)]!;
    const tag = tagOf(h);
    const chunks = this.#chunks;
    for (let slot = homeOf(h, slots.length); ; ) {
      const entry = slots[slot]!;
      if (entry === 0) return none;
      if (entry >>> recordBits === tag) {
        const record = (entry & recordMask) - 1;
        const chunk = chunks[record >>> chunkBits]!;
        const at = (record & chunkMask) * words;
        if (chunk[at] === low && chunk[at + 1] === high) return record;
      }
      if (++slot === slots.length) slot = 0;
    }
  }

  /**
   * Has what two look-ups need on its way at once: of both the slot, then of both the record that is named there. A look-up decides by what it
   * reads, and the next one's memory is only asked for when the processor has guessed right.
   */
  fetch(keys: Keys, a: number, b: number): void {
    const one = this.#entryOf(keys[2 * a]!, keys[2 * a + 1]!);
    const other = this.#entryOf(keys[2 * b]!, keys[2 * b + 1]!);
    this.fetched = this.#wordOf(one) ^ this.#wordOf(other);
  }

  /** A record for a hash that has none. The caller has made sure of room. */
  insert(low: number, high: number, run: number, place: number): number {
    const record = this.#take();
    const chunk = this.#chunks[record >>> chunkBits]!;
    const at = (record & chunkMask) * words;
    chunk[at] = low;
    chunk[at + 1] = high;
    chunk[at + runAt] = run;
    chunk[at + placeAt] = place;
    const h = mix(low, high);
    const shard = this.#shards[h >>> (32 - shardBits)]!;
    if (isFull(shard.count, shard.slots)) {
      const before = shard.slots;
      this.#slots += before.length >>> 1;
      shard.slots = new Int32Array(before.length + (before.length >>> 1));
      for (const entry of before) if (entry !== 0) placeIn(shard.slots, this.#mixOf((entry & recordMask) - 1), entry);
    }
    placeIn(shard.slots, h, entryOf(h, record));
    shard.count++;
    this.#count++;
    return record;
  }

  delete(record: number): void {
    const h = this.#mixOf(record);
    const shard = this.#shards[h >>> (32 - shardBits)]!;
    const { slots } = shard;
    const { length } = slots;
    let hole = homeOf(h, length);
    const gone = entryOf(h, record);
    while (slots[hole] !== gone) hole = hole + 1 === length ? 0 : hole + 1;
    for (let next = hole; ; ) {
      next = next + 1 === length ? 0 : next + 1;
      const entry = slots[next]!;
      if (entry === 0) break;
      const home = homeOf(this.#mixOf((entry & recordMask) - 1), length);
      if ((next - home + length) % length < (next - hole + length) % length) continue;
      slots[hole] = entry;
      hole = next;
    }
    slots[hole] = 0;
    shard.count--;
    this.#count--;
    const chunk = this.#chunks[record >>> chunkBits]!;
    const at = (record & chunkMask) * words;
    chunk[at] = this.#free;
    chunk[at + runAt] = none;
    this.#free = record;
  }

  /** `none`: the record was given back. */
  runOf(record: number): number {
    return this.#chunks[record >>> chunkBits]![(record & chunkMask) * words + runAt]!;
  }

  placeOf(record: number): number {
    return this.#chunks[record >>> chunkBits]![(record & chunkMask) * words + placeAt]!;
  }

  move(record: number, run: number, place: number): void {
    const at = (record & chunkMask) * words;
    this.#chunks[record >>> chunkBits]![at + runAt] = run;
    this.#chunks[record >>> chunkBits]![at + placeAt] = place;
  }

  /** Of an ordered record: what its run's order comes to, up to here (`folds.ts`). */
  foldOf(record: number): number {
    return this.#chunks[record >>> chunkBits]![(record & chunkMask) * words + foldAt]!;
  }

  setFold(record: number, fold: number): void {
    this.#chunks[record >>> chunkBits]![(record & chunkMask) * words + foldAt] = fold;
  }

  highOf(record: number): number {
    return this.#chunks[record >>> chunkBits]![(record & chunkMask) * words + 1]!;
  }

  #entryOf(low: number, high: number): number {
    const h = mix(low, high);
    const { slots } = this.#shards[h >>> (32 - shardBits)]!;
    return slots[homeOf(h, slots.length)]!;
  }

  /** Some word of the record that a slot names. */
  #wordOf(entry: number): number {
    const record = Math.max((entry & recordMask) - 1, 0);
    const chunk = this.#chunks[record >>> chunkBits];
    return chunk === undefined ? 0 : chunk[(record & chunkMask) * words]!;
  }

  #mixOf(record: number): number {
    const chunk = this.#chunks[record >>> chunkBits]!;
    const at = (record & chunkMask) * words;
    return mix(chunk[at]!, chunk[at + 1]!);
  }

  #take(): number {
    const record = this.#free;
    if (record !== none) {
      this.#free = this.#chunks[record >>> chunkBits]![(record & chunkMask) * words]!;
      return record;
    }
    if (this.#used === this.#chunks.length * chunkRecords) this.#chunks.push(new Int32Array(chunkRecords * words));
    return this.#used++;
  }
}

/** A shard with so many records has to grow before the next one. */
const isFull = (count: number, { length }: Int32Array): boolean => (count + 1) * 5 > length * 4;

function placeIn(slots: Int32Array, h: number, entry: number): void {
  let slot = homeOf(h, slots.length);
  while (slots[slot] !== 0) if (++slot === slots.length) slot = 0;
  slots[slot] = entry;
}

/** 32 well mixed bits (the finalizer of MurmurHash3). */
function mix(low: number, high: number): number {
  let h = Math.imul(low ^ Math.imul(high, 0x85ebca6b), 0xcc9e2d51);
  h = Math.imul(h ^ (h >>> 16) ^ high, 0x85ebca6b);
  h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35);
  return h ^ (h >>> 16);
}

/** Bits that neither the shard nor, but in the largest ones, the slot is chosen by. */
const tagOf = (h: number): number => h & ((1 << (32 - recordBits)) - 1);

const entryOf = (h: number, record: number): number => (tagOf(h) << recordBits) | (record + 1);

function homeOf(h: number, slots: number): number {
  return ((((h << shardBits) >>> 0) * slots) / 0x1_0000_0000) | 0;
}
