/**
 * One index over all tiers: for every block that any tier holds, which ones. Fed by `Tier.follow`, so that a lookup asks no
 * tier: it reads one small record per block, in typed arrays, without making a string.
 *
 *     name (namespace, hash) ──▶ 128 bits ──▶ 32 bits ──▶ record number (row-slots.ts of the tiers' kit)
 *     records, in chunks, 24 bytes each:
 *       [ word0 | word1 | word2 | word3 | tiers 8 · tenant 12 | expires, s ]
 *
 * Blocks of a chain come one after another, and so their records lie side by side: a lookup tries the neighbour of the last
 * record first, and asks the table only where a chain was interrupted. That is what keeps it out of memory's latency.
 *
 * What concerns a whole tier takes many turns, a slice in each: what it holds is taken in page by page, and when it has lost all,
 * its bit counts for nothing from that moment on, while it is taken out of the records one after the other (`followed-tier.ts`).
 *
 * Invariants: a record exists exactly while at least one tier holds the block, or has to be taken out of it. The index is
 * a hint, never a proof: tiers verify the full name when they read.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import { RowSlots, Slices, slicing, type Tier } from '@kvtier/tiers';
import { type Chain, hashCount, mix, tagOf, writeWords } from './chain-words.ts';
import { type Followable, FollowedTier, type OnChange, type TierRecords } from './followed-tier.ts';

/** At most this many tiers, the arena included. */
export const maxTiers = 8;
export const maxTenants = 1 << 12;
const recordWords = 6;
const metaAt = 4;
const expiresAt = 5;
const tiersMask = 0xff;
const tenantShift = 8;
/** Records of one chunk: memory comes in pieces of 384 KiB. */
const chunkBits = 14;
const chunkRecords = 1 << chunkBits;
const chunkMask = chunkRecords - 1;
const shardBits = 8;
/** Not a record. */
const none = -1;

export type OnTiers = (word: number, before: number, after: number) => void;

export class Residency implements TierRecords {
  readonly #slots = new RowSlots(shardBits);
  readonly #chunks: Int32Array[] = [];
  /** Records that were given back: the last one, each leads to the one before in its first word. */
  #free = none;
  /** Records that were ever used. */
  #used = 0;
  #count = 0;
  #expiring = 0;
  readonly #tags = new Map<string, Int32Array>();
  readonly #onGone: (record: number) => void;
  readonly #onTiers: OnTiers;
  readonly #followed: FollowedTier[] = [];
  readonly #slices = new Slices();
  readonly #sliceBlocks: number;
  /** Tiers whose bits say something. */
  #counting = tiersMask;
  /** Where `lookup` leaves the tiers of each block that it found. */
  #found: Uint8Array = new Uint8Array(1024);
  #words: Int32Array = new Int32Array(4 * 1024);
  #packed: Uint8Array = new Uint8Array(this.#words.buffer);
  readonly #one = new Int32Array(4);

  /**
   * @param onGone hears when the record of a block that was marked with an expiry goes, whatever made it go
   * @param slice records that are looked at in one turn when a tier has lost all
   * @param onTiers hears of each record whose tiers change: the first word of its name, the tiers before and after
   */
  constructor(onGone: (record: number) => void = () => {}, slice = 16 * slicing.blocks, onTiers: OnTiers = () => {}) {
    this.#onGone = onGone;
    this.#onTiers = onTiers;
    this.#sliceBlocks = slice;
  }

  /** Blocks that at least one tier holds. */
  get count(): number {
    return this.#count;
  }

  /** Of these, with an expiry. */
  get expiringCount(): number {
    return this.#expiring;
  }

  /** Memory of the index. */
  get bytes(): number {
    return this.#chunks.length * chunkRecords * recordWords * 4 + this.#slots.bytes;
  }

  /**
   * Keep bit `bit` in step with this tier. `onChange` hears of each block while it has a record, once each way; `onCleared` that the
   * tier holds nothing. The first of what it holds is known when this returns, the rest turns later.
   */
  follow(tier: Followable, bit: number, onChange: OnChange = () => {}, onCleared: () => void = () => {}): void {
    invariant(bit < maxTiers, 'residency: too many tiers');
    const events = { onChange, onCleared };
    this.#followed.push(new FollowedTier(tier, 1 << bit, this, this.#slices, events));
  }

  /** Every tier is listed, and what is to be taken out is out: nothing is left to do in later turns. */
  get settled(): boolean {
    return this.#slices.idle;
  }

  close(): void {
    for (const followed of this.#followed.splice(0)) followed.end();
  }

  /** The number of the block's record, the same for as long as a tier holds it; -1: none does. */
  recordOf(namespace: Namespace, hash: HashKey): number {
    return this.#find(this.#wordsOf(namespace, hash), 0);
  }

  /** These tiers hold the block now. Returns the number of its record; -1: they were listed as its holders before. */
  set(namespace: Namespace, hash: HashKey, tiers: number): number {
    const words = this.#wordsOf(namespace, hash);
    let record = this.#find(words, 0);
    if (record === none) {
      record = this.#take();
      const chunk = this.#chunks[record >>> chunkBits]!;
      const at = (record & chunkMask) * recordWords;
      for (let lane = 0; lane < 4; lane++) chunk[at + lane] = words[lane]!;
      chunk[at + metaAt] = tiers;
      chunk[at + expiresAt] = 0;
      this.#insert(record);
      this.#onTiers(words[0]!, 0, tiers);
      return record;
    }
    const chunk = this.#chunks[record >>> chunkBits]!;
    const at = (record & chunkMask) * recordWords;
    const before = chunk[at + metaAt]!;
    if ((before & this.#counting) === 0) {
      // Nobody holds it: it begins anew.
      this.#endsNot(record);
      chunk[at + metaAt] = tiers;
    } else chunk[at + metaAt] = before | tiers;
    this.#onTiers(chunk[at]!, before & tiersMask, chunk[at + metaAt]! & tiersMask);
    return (before & tiers) === 0 ? record : none;
  }

  /** These tiers do not hold the block any more. */
  clear(namespace: Namespace, hash: HashKey, tiers: number): void {
    const record = this.#find(this.#wordsOf(namespace, hash), 0);
    if (record !== none) this.#drop(record, tiers);
  }

  mute(tiers: number): number {
    this.#counting &= ~tiers;
    return this.#used;
  }

  /** Records that are made meanwhile are without them. */
  takeOut(tiers: number, from: number): number {
    const to = Math.max(0, from - this.#sliceBlocks);
    for (let record = from - 1; record >= to; record--) {
      const meta = this.#chunks[record >>> chunkBits]![(record & chunkMask) * recordWords + metaAt]!;
      if ((meta & tiers) !== 0) this.#drop(record, tiers);
    }
    if (to === 0) this.#counting |= tiers;
    return to;
  }

  /** Which tiers hold the block, as bits; 0: none. */
  tiers(namespace: Namespace, hash: HashKey): number {
    return this.#read(namespace, hash, metaAt) & this.#counting;
  }

  /** Second of expiry, of Unix time; 0: none. */
  expiresS(namespace: Namespace, hash: HashKey): number {
    return this.#read(namespace, hash, expiresAt) >>> 0;
  }

  /** Number of the tenant who pays for the block. */
  tenant(namespace: Namespace, hash: HashKey): number {
    return (this.#read(namespace, hash, metaAt) >>> tenantShift) & (maxTenants - 1);
  }

  /** Who pays for the block, and when it ends (0: never). Nothing happens when no tier holds it. */
  mark(namespace: Namespace, hash: HashKey, tenant: number, expiresS: number): void {
    invariant(tenant < maxTenants, 'residency: too many tenants');
    const record = this.#find(this.#wordsOf(namespace, hash), 0);
    if (record === none) return;
    const chunk = this.#chunks[record >>> chunkBits]!;
    const at = (record & chunkMask) * recordWords;
    if ((chunk[at + metaAt]! & this.#counting) === 0) return;
    chunk[at + metaAt] = (chunk[at + metaAt]! & tiersMask) | (tenant << tenantShift);
    this.#expiring += (expiresS === 0 ? 0 : 1) - (chunk[at + expiresAt] === 0 ? 0 : 1);
    chunk[at + expiresAt] = expiresS;
  }

  /**
   * How many blocks of the chain are held from the first on, without a gap, by tiers among `available` and not expired at
   * `nowS`. `found[i]` are the tiers of block i, all of them; valid until the next call.
   */
  lookup(namespace: Namespace, chain: Chain, available: number, nowS: number): { held: number; found: Uint8Array } {
    const count = hashCount(chain);
    const words = this.#load(chain, count);
    const stride = 'packed' in chain ? chain.hashBytes >>> 2 : 4;
    const tag = this.#tagOf(namespace);
    const t0 = tag[0]!;
    const t1 = tag[1]!;
    const t2 = tag[2]!;
    const t3 = tag[3]!;
    const found = this.#found;
    const one = this.#one;
    const counting = this.#counting;
    const asked = available & counting;
    let record = none;
    let step = 1;
    let held = 0;
    for (let source = 0; held < count; held++, source += stride) {
      const a = words[source]! ^ t0;
      const b = words[source + 1]! ^ t1;
      const c = words[source + 2]! ^ t2;
      const d = words[source + 3]! ^ t3;
      let next = record + step;
      let chunk = this.#chunks[next >>> chunkBits];
      let at = (next & chunkMask) * recordWords;
      if (
        record === none ||
        chunk === undefined ||
        !(chunk[at] === a && chunk[at + 1] === b && chunk[at + 2] === c && chunk[at + 3] === d) ||
        (chunk[at + metaAt]! & tiersMask) === 0
      ) {
        one[0] = a;
        one[1] = b;
        one[2] = c;
        one[3] = d;
        next = this.#find(one, 0);
        if (next === none) break;
        chunk = this.#chunks[next >>> chunkBits]!;
        at = (next & chunkMask) * recordWords;
        step = next === record - 1 ? -1 : 1;
      }
      record = next;
      const meta = chunk[at + metaAt]!;
      const expires = chunk[at + expiresAt]! >>> 0;
      if ((meta & asked) === 0 || (expires !== 0 && expires <= nowS)) break;
      found[held] = meta & counting;
    }
    return { held, found };
  }

  /** Throws InvariantError unless the table says what the tiers say, as far as it has listed them, and its own structure is sound. */
  checkIntegrity(tiers: readonly Pick<Tier, 'follow'>[]): void {
    const held = new Map<string, number>();
    for (const [bit, tier] of tiers.entries()) {
      if ((this.#counting & (1 << bit)) === 0) continue;
      const end = tier.follow(({ namespace, hashes }) => {
        for (const hash of hashes) {
          const name = this.#wordsOf(namespace!, hash).join();
          held.set(name, (held.get(name) ?? 0) | (1 << bit));
        }
      });
      end();
    }
    let listing = 0;
    for (const followed of this.#followed) if (followed.isListing) listing |= followed.bits;
    const total = this.#slots.checkIntegrity('residency', (record) => {
      const name = this.#nameOf(record);
      const meta = this.#chunks[record >>> chunkBits]![(record & chunkMask) * recordWords + metaAt]!;
      const expected = held.get(name.join()) ?? 0;
      held.delete(name.join());
      invariant(this.#find(name, 0) === record, 'residency: a record cannot be found');
      invariant((meta & tiersMask) !== 0, 'residency: a record that no tier holds');
      invariant((meta & this.#counting & ~expected) === 0, 'residency: a record names the wrong tiers');
      invariant((expected & ~listing & ~meta) === 0, 'residency: a record lacks a tier');
    });
    let free = 0;
    for (let record = this.#free; record !== none; record = this.#nameOf(record)[0]!) free++;
    for (const bits of held.values())
      invariant((bits & ~listing) === 0, 'residency: a block that a tier holds is not listed');
    invariant(total === this.#count, 'residency: records are miscounted');
    invariant(free + total === this.#used, 'residency: a record is lost');
  }

  #tagOf(namespace: Namespace): Int32Array {
    let tag = this.#tags.get(namespace.key);
    if (tag === undefined) {
      // Namespaces come from outside: the memory of their tags is bounded, and a tag can be made again.
      if (this.#tags.size >= 4096) this.#tags.clear();
      tag = tagOf(namespace.key);
      this.#tags.set(namespace.key, tag);
    }
    return tag;
  }

  #wordsOf(namespace: Namespace, hash: HashKey): Int32Array {
    const tag = this.#tagOf(namespace);
    writeWords(hash, this.#one, 0);
    for (let lane = 0; lane < 4; lane++) this.#one[lane]! ^= tag[lane]!;
    return this.#one;
  }

  #read(namespace: Namespace, hash: HashKey, word: number): number {
    const record = this.#find(this.#wordsOf(namespace, hash), 0);
    if (record === none) return 0;
    const chunk = this.#chunks[record >>> chunkBits]!;
    const at = (record & chunkMask) * recordWords;
    return (chunk[at + metaAt]! & this.#counting) === 0 ? 0 : chunk[at + word]!;
  }

  /** The chain's first 16 bytes of each hash, aligned. */
  #load(chain: Chain, count: number): Int32Array {
    if (this.#found.length < count) this.#found = new Uint8Array(count * 2);
    const bytes = 'packed' in chain ? chain.packed.length : count * 16;
    if (this.#packed.length < bytes) {
      this.#words = new Int32Array((bytes * 2 + 15) >>> 2);
      this.#packed = new Uint8Array(this.#words.buffer);
    }
    if ('packed' in chain) {
      invariant(chain.hashBytes >= 16 && chain.hashBytes % 4 === 0, 'residency: packed hashes of an odd size');
      this.#packed.set(chain.packed);
    } else for (let i = 0; i < count; i++) writeWords(chain[i]!, this.#words, 4 * i);
    return this.#words;
  }

  /** The record of a name (4 words from `from` on), `none` when there is none. */
  #find(name: Int32Array, from: number): number {
    const h = mix(name, from);
    const { slots, length } = this.#slots.shardOf(h);
    const chunks = this.#chunks;
    for (let slot = this.#slots.homeOf(h, length); ; ) {
      const record = slots[2 * slot]! - 1;
      if (record === none) return none;
      if (slots[2 * slot + 1] === h) {
        const chunk = chunks[record >>> chunkBits]!;
        const at = (record & chunkMask) * recordWords;
        if (
          chunk[at] === name[from] &&
          chunk[at + 1] === name[from + 1] &&
          chunk[at + 2] === name[from + 2] &&
          chunk[at + 3] === name[from + 3]
        )
          return record;
      }
      if (++slot === length) slot = 0;
    }
  }

  #nameOf(record: number): Int32Array {
    const at = (record & chunkMask) * recordWords;
    return this.#chunks[record >>> chunkBits]!.subarray(at, at + 4);
  }

  #mixOf(record: number): number {
    return mix(this.#chunks[record >>> chunkBits]!, (record & chunkMask) * recordWords);
  }

  /** An unused record: the one given back last, so that a chain that shrank from its tail leaves room in chain order. */
  #take(): number {
    const record = this.#free;
    if (record !== none) {
      this.#free = this.#nameOf(record)[0]!;
      return record;
    }
    if (this.#used === this.#chunks.length * chunkRecords)
      this.#chunks.push(new Int32Array(chunkRecords * recordWords));
    return this.#used++;
  }

  #insert(record: number): void {
    this.#slots.add(this.#mixOf(record), record);
    this.#count++;
  }

  /** Unlist it from these tiers; from the last one it goes altogether. */
  #drop(record: number, tiers: number): void {
    const chunk = this.#chunks[record >>> chunkBits]!;
    const at = (record & chunkMask) * recordWords;
    const before = chunk[at + metaAt]! & tiersMask;
    chunk[at + metaAt]! &= ~tiers;
    this.#onTiers(chunk[at]!, before, before & ~tiers);
    if ((chunk[at + metaAt]! & tiersMask) !== 0) return;
    this.#endsNot(record);
    this.#slots.remove(this.#mixOf(record), record);
    chunk.fill(0, at, at + recordWords);
    chunk[at] = this.#free;
    this.#free = record;
    this.#count--;
  }

  /** The block has no expiry any more. */
  #endsNot(record: number): void {
    const chunk = this.#chunks[record >>> chunkBits]!;
    const at = (record & chunkMask) * recordWords + expiresAt;
    if (chunk[at] === 0) return;
    chunk[at] = 0;
    this.#expiring--;
    this.#onGone(record);
  }
}
