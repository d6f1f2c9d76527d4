/**
 * Where the rows of a large table are found: by a 32-bit mix of their names, without making a string or an object.
 *
 *     mix ──▶ shard (top bits) ──▶ slot, linear probing ──▶ row number + 1 (0: free), and the mix beside it, so that no row is looked
 *                                                           at but the right one
 *
 * Invariants: a shard is at most 80 % full and grows alone, by half, so that no turn pays for the whole table. One that is larger than it
 * began is at least 20 % full: below that it shrinks alone, by half, so that rows that went leave no memory behind. Removal shifts back, so
 * there are no tombstones. (Linear probing with backward shift: Knuth 6.4 R; a multiplication in place of a modulus: Lemire's fast range.)
 *
 * Who looks for a row walks the slots itself, from `homeOf` on to the first free one: what a name is like only the table knows.
 */
import { invariant } from '@kvtier/errors';

/** Two words a slot, side by side for the cache's sake: row number + 1, and the mix of its name. */
export interface Shard {
  slots: Int32Array;
  length: number;
  count: number;
  /** Its length while it is empty. */
  readonly first: number;
}

const firstSlots = 16;

export class RowSlots {
  readonly #bits: number;
  readonly #shards: Shard[];

  /** 2 to the power of `bits` shards. */
  constructor(bits: number) {
    this.#bits = bits;
    // Shards fill up alike: they begin with different sizes, so that they do not all grow at the same time.
    this.#shards = Array.from({ length: 1 << bits }, (_, number) =>
      shardOf(Math.floor(firstSlots * 1.5 ** (number / (1 << bits)))),
    );
  }

  get bytes(): number {
    return this.#shards.reduce((sum, { slots }) => sum + slots.byteLength, 0);
  }

  shardOf(mix: number): Shard {
    return this.#shards[mix >>> (32 - this.#bits)]!;
  }

  /** The bits below those that chose the shard, spread over its slots. */
  homeOf(mix: number, length: number): number {
    return ((((mix << this.#bits) >>> 0) * length) / 0x1_0000_0000) | 0;
  }

  /** A row that is not listed. */
  add(mix: number, row: number): void {
    const shard = this.shardOf(mix);
    if ((shard.count + 1) * 5 > shard.length * 4) this.#resize(shard, shard.length + (shard.length >>> 1));
    this.#place(shard, mix, row + 1);
    shard.count++;
  }

  /** A row that is listed. What stands at or after its home beyond the hole may take the hole's place. */
  remove(mix: number, row: number): void {
    const shard = this.shardOf(mix);
    const { slots, length } = shard;
    let hole = this.homeOf(mix, length);
    while (slots[2 * hole] !== row + 1) hole = hole + 1 === length ? 0 : hole + 1;
    for (let next = hole; ; ) {
      next = next + 1 === length ? 0 : next + 1;
      if (slots[2 * next] === 0) break;
      const home = this.homeOf(slots[2 * next + 1]!, length);
      if ((next - home + length) % length < (next - hole + length) % length) continue;
      slots[2 * hole] = slots[2 * next]!;
      slots[2 * hole + 1] = slots[2 * next + 1]!;
      hole = next;
    }
    slots[2 * hole] = 0;
    if (--shard.count * 5 >= length) return;
    // Then it is 40 % full: one row that comes and goes moves no others.
    if (length > shard.first) this.#resize(shard, Math.max(shard.first, length >>> 1));
  }

  clear(): void {
    for (const shard of this.#shards) Object.assign(shard, shardOf(shard.first));
  }

  /** Each row that is listed; returns how many. Throws InvariantError: a shard lists what is another's, or miscounts. */
  checkIntegrity(what: string, each: (row: number) => void): number {
    let listed = 0;
    for (const [number, { slots, length, count }] of this.#shards.entries()) {
      let used = 0;
      for (let slot = 0; slot < length; slot++) {
        const entry = slots[2 * slot]!;
        if (entry === 0) continue;
        used++;
        const isIts = slots[2 * slot + 1]! >>> (32 - this.#bits) === number;
        invariant(isIts, () => `${what}: a row is listed in a wrong shard`);
        each(entry - 1);
      }
      invariant(used === count, () => `${what}: a shard miscounts`);
      listed += used;
    }
    return listed;
  }

  #place({ slots, length }: Shard, mix: number, entry: number): void {
    let slot = this.homeOf(mix, length);
    while (slots[2 * slot] !== 0) if (++slot === length) slot = 0;
    slots[2 * slot] = entry;
    slots[2 * slot + 1] = mix;
  }

  #resize(shard: Shard, length: number): void {
    const { slots } = shard;
    shard.length = length;
    shard.slots = new Int32Array(2 * length);
    for (let at = 0; at < slots.length; at += 2) if (slots[at] !== 0) this.#place(shard, slots[at + 1]!, slots[at]!);
  }
}

const shardOf = (first: number): Shard => ({ slots: new Int32Array(2 * first), length: first, count: 0, first });
