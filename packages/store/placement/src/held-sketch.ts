/**
 * What is held, as a table that engines on this host read without asking: most lookups ask for what nobody holds, and each costs the
 * engine the way to a process that sleeps.
 *
 *     name of a block ──▶ its bucket: one byte, "near" (1): a tier but the peers holds one of its blocks; "held" (2): some tier does;
 *                         "arena" (4): the arena does
 *
 * Names share buckets, so a byte says too much now and then, and an engine asks in vain; it never says too little: a bucket counts its
 * blocks, and a count that is full stays so. The byte is written before the change is answered to anybody.
 */
import { invariant } from '@kvtier/errors';

export const heldFlags = { near: 1, held: 2, arena: 4 } as const;

export interface HeldTable {
  /** A power of two. */
  readonly buckets: number;
  write(bucket: number, flags: number): void;
}

const full = 0xff;
/** Of a block's tiers. */
const arenaBit = 1;

export class HeldSketch {
  readonly #table: HeldTable;
  readonly #nearBits: number;
  readonly #near: Uint8Array;
  readonly #held: Uint8Array;
  readonly #arena: Uint8Array;

  /** @param nearBits of a block's tiers, those that are near */
  constructor(table: HeldTable, nearBits: number) {
    invariant((table.buckets & (table.buckets - 1)) === 0, 'held sketch: a number of buckets that is no power of two');
    this.#table = table;
    this.#nearBits = nearBits;
    this.#near = new Uint8Array(table.buckets);
    this.#held = new Uint8Array(table.buckets);
    this.#arena = new Uint8Array(table.buckets);
  }

  /** The tiers of a block have changed. @param word the first of its name */
  change(word: number, before: number, after: number): void {
    const bucket = (word & (this.#table.buckets - 1)) >>> 0;
    const flags = this.#flags(bucket);
    step(this.#near, bucket, before & this.#nearBits, after & this.#nearBits);
    step(this.#held, bucket, before, after);
    step(this.#arena, bucket, before & arenaBit, after & arenaBit);
    if (this.#flags(bucket) !== flags) this.#table.write(bucket, this.#flags(bucket));
  }

  #flags(bucket: number): number {
    const near = this.#near[bucket] === 0 ? 0 : heldFlags.near;
    const held = this.#held[bucket] === 0 ? 0 : heldFlags.held;
    return near | held | (this.#arena[bucket] === 0 ? 0 : heldFlags.arena);
  }
}

function step(counts: Uint8Array, bucket: number, before: number, after: number): void {
  const count = counts[bucket]!;
  if (count < full) counts[bucket] = count + Number(after !== 0) - Number(before !== 0);
}
