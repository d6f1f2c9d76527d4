/**
 * One index over all tiers: for every block that any tier holds, which ones. Fed by `Tier.follow`, so that a lookup asks no
 * tier: it reads one small record per block, in typed arrays, without making a string.
 *
 *     name (namespace, hash) ──▶ 128 bits ──▶ shard (top bits) ──▶ slot, linear probing
 *     record, 24 bytes:  [ word0 | word1 | word2 | word3 | tiers 8 · tenant 12 · marks 12 | expires, s ]
 *
 * Invariants: a record exists exactly while at least one tier holds the block; a shard is at most 80 % full and grows
 * alone, by half, so that no turn pays for the whole table; deletion shifts back, so there are no tombstones. The table is
 * a hint, never a proof: tiers verify the full name when they read. (Open addressing with backward shift: Knuth 6.4 R;
 * "fast range" in place of a modulus: Lemire.)
 */
import { invariant } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Tier } from '@kvtier/tiers';

/** Hashes one after another, as they travel on the session link. */
export interface PackedHashes {
  readonly packed: Uint8Array;
  readonly hashBytes: number;
}
export type Chain = readonly HashKey[] | PackedHashes;

/** At most this many tiers, the arena included. */
export const maxTiers = 8;
const recordWords = 6;
const tiersMask = 0xff;
const metaAt = 4;
const expiresAt = 5;
const tenantShift = 8;
export const maxTenants = 1 << 12;
/** Shards: one grows at a time. */
const shardBits = 8;
const shardCount = 1 << shardBits;
const firstSlots = 16;

interface Shard {
  words: Uint32Array;
  slots: number;
  count: number;
}

/** The 128 bits that stand for a namespace, from its key. */
function tagOf(key: string): Uint32Array {
  const tag = Uint32Array.of(0x9e3779b9, 0x85ebca6b, 0xc2b2ae35, 0x27d4eb2f);
  for (let at = 0; at < key.length; at++) {
    for (let lane = 0; lane < 4; lane++) {
      const mixed = Math.imul(tag[lane]! ^ (key.charCodeAt(at) + 1 + lane), 0x01000193 + 2 * lane);
      tag[lane] = mixed ^ (mixed >>> 15);
    }
  }
  return tag;
}

function mix(a: number, b: number, c: number, d: number): number {
  let h = Math.imul(a ^ Math.imul(b, 0x85ebca6b), 0xcc9e2d51) ^ Math.imul(c ^ (d << 7) ^ (d >>> 25), 0x1b873593);
  h = Math.imul(h ^ (h >>> 16), 0x85ebca6b);
  h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35);
  return (h ^ (h >>> 16)) >>> 0;
}

export const hashCount = (chain: Chain): number =>
  'packed' in chain ? chain.packed.length / chain.hashBytes : chain.length;

/** The keys of `from`..`to` of a chain. */
export function keysOf(chain: Chain, from = 0, to = hashCount(chain)): HashKey[] {
  if (!('packed' in chain)) return chain.slice(from, to);
  const { packed, hashBytes } = chain;
  const bytes = Buffer.from(packed.buffer, packed.byteOffset, packed.length);
  const keys: HashKey[] = [];
  for (let at = from; at < to; at++)
    keys.push(bytes.toString('latin1', at * hashBytes, (at + 1) * hashBytes) as HashKey);
  return keys;
}

export class Residency {
  readonly #shards: Shard[] = [];
  readonly #tags = new Map<string, Uint32Array>();
  readonly #unfollow: (() => void)[] = [];
  /** Where `lookup` leaves the tiers of each block that it found. */
  #found: Uint8Array = new Uint8Array(1024);
  #words: Uint32Array = new Uint32Array(4 * 1024);
  #packed: Uint8Array = new Uint8Array(this.#words.buffer);
  readonly #one = new Uint32Array(4);
  #count = 0;

  constructor() {
    for (let i = 0; i < shardCount; i++) {
      this.#shards.push({ words: new Uint32Array(firstSlots * recordWords), slots: firstSlots, count: 0 });
    }
  }

  /** Blocks that at least one tier holds. */
  get count(): number {
    return this.#count;
  }

  /** Memory of the table. */
  get bytes(): number {
    let bytes = 0;
    for (const { words } of this.#shards) bytes += words.byteLength;
    return bytes;
  }

  /** Keep bit `bit` in step with this tier. `onChange` hears of each block after the table knows. */
  follow(
    tier: Pick<Tier, 'follow'>,
    bit: number,
    onChange?: (namespace: Namespace, hash: HashKey, held: boolean) => void,
    onCleared?: () => void,
  ): void {
    invariant(bit < maxTiers, 'residency: too many tiers');
    const end = tier.follow((change) => {
      if (change.kind === 'cleared') {
        this.#clear(1 << bit);
        onCleared?.();
        return;
      }
      const held = change.kind === 'stored';
      for (const hash of change.hashes) {
        if (held) this.set(change.namespace, hash, 1 << bit);
        else this.clear(change.namespace, hash, 1 << bit);
        onChange?.(change.namespace, hash, held);
      }
    });
    this.#unfollow.push(end);
  }

  close(): void {
    for (const end of this.#unfollow.splice(0)) end();
  }

  /** These tiers hold the block now. */
  set(namespace: Namespace, hash: HashKey, tiers: number): void {
    const words = this.#wordsOf(namespace, hash);
    const h = mix(words[0]!, words[1]!, words[2]!, words[3]!);
    const shard = this.#shards[h >>> (32 - shardBits)]!;
    let at = this.#find(shard, h, words[0]!, words[1]!, words[2]!, words[3]!);
    if (at < 0) {
      if ((shard.count + 1) * 5 > shard.slots * 4) {
        this.#grow(shard);
        at = this.#find(shard, h, words[0]!, words[1]!, words[2]!, words[3]!);
      }
      at = -1 - at;
      shard.words.set(words, at);
      shard.words[at + metaAt] = 0;
      shard.words[at + expiresAt] = 0;
      shard.count++;
      this.#count++;
    }
    shard.words[at + metaAt]! |= tiers;
  }

  /** These tiers do not hold the block any more. */
  clear(namespace: Namespace, hash: HashKey, tiers: number): void {
    const words = this.#wordsOf(namespace, hash);
    const h = mix(words[0]!, words[1]!, words[2]!, words[3]!);
    const shard = this.#shards[h >>> (32 - shardBits)]!;
    const at = this.#find(shard, h, words[0]!, words[1]!, words[2]!, words[3]!);
    if (at < 0) return;
    shard.words[at + metaAt]! &= ~tiers;
    if ((shard.words[at + metaAt]! & tiersMask) === 0) this.#delete(shard, at);
  }

  /** Which tiers hold the block, as bits; 0: none. */
  tiers(namespace: Namespace, hash: HashKey): number {
    const { shard, at } = this.#record(namespace, hash);
    return at < 0 ? 0 : shard.words[at + metaAt]! & tiersMask;
  }

  /** Second of expiry, on the store's clock; 0: none. */
  expiresS(namespace: Namespace, hash: HashKey): number {
    const { shard, at } = this.#record(namespace, hash);
    return at < 0 ? 0 : shard.words[at + expiresAt]!;
  }

  /** Who pays for the block (0: nobody in particular) and when it ends. Nothing happens when no tier holds it. */
  mark(namespace: Namespace, hash: HashKey, tenant: number, expiresS: number): void {
    invariant(tenant < maxTenants, 'residency: too many tenants');
    const { shard, at } = this.#record(namespace, hash);
    if (at < 0) return;
    shard.words[at + metaAt] =
      (shard.words[at + metaAt]! & ~((maxTenants - 1) << tenantShift)) | (tenant << tenantShift);
    shard.words[at + expiresAt] = expiresS;
  }

  tenant(namespace: Namespace, hash: HashKey): number {
    const { shard, at } = this.#record(namespace, hash);
    return at < 0 ? 0 : (shard.words[at + metaAt]! >>> tenantShift) & (maxTenants - 1);
  }

  /**
   * How many blocks of the chain are held from the first on, without a gap, by tiers among `available` and not expired at
   * `nowS`. `found[i]` are the tiers of block i, all of them; valid until the next call.
   */
  lookup(namespace: Namespace, chain: Chain, available: number, nowS: number): { held: number; found: Uint8Array } {
    const count = hashCount(chain);
    const words = this.#load(chain, count);
    const tag = this.#tagOf(namespace);
    const [t0, t1, t2, t3] = [tag[0]!, tag[1]!, tag[2]!, tag[3]!];
    const found = this.#found;
    const shards = this.#shards;
    const stride = 'packed' in chain ? chain.hashBytes >>> 2 : 4;
    let held = 0;
    for (let source = 0; held < count; held++, source += stride) {
      const a = (words[source]! ^ t0) >>> 0;
      const b = (words[source + 1]! ^ t1) >>> 0;
      const c = (words[source + 2]! ^ t2) >>> 0;
      const d = (words[source + 3]! ^ t3) >>> 0;
      const h = mix(a, b, c, d);
      const shard = shards[h >>> (32 - shardBits)]!;
      const at = this.#find(shard, h, a, b, c, d);
      if (at < 0) break;
      const meta = shard.words[at + metaAt]!;
      if ((meta & available) === 0) break;
      const expires = shard.words[at + expiresAt]!;
      if (expires !== 0 && expires <= nowS) break;
      found[held] = meta & tiersMask;
    }
    return { held, found };
  }

  /** Throws InvariantError unless the table says what the tiers say, and its own structure is sound. */
  checkIntegrity(tiers: readonly Pick<Tier, 'follow'>[]): void {
    const held = new Map<string, number>();
    for (const [bit, tier] of tiers.entries()) {
      const end = tier.follow(({ namespace, hashes }) => {
        for (const hash of hashes) {
          const name = this.#wordsOf(namespace!, hash).join();
          held.set(name, (held.get(name) ?? 0) | (1 << bit));
        }
      });
      end();
    }
    let total = 0;
    for (const [number, shard] of this.#shards.entries()) {
      let used = 0;
      for (let at = 0; at < shard.words.length; at += recordWords) {
        const tiersOfRecord = shard.words[at + metaAt]! & tiersMask;
        if (tiersOfRecord === 0) continue;
        used++;
        const [a, b, c, d] = shard.words.subarray(at, at + 4) as unknown as [number, number, number, number];
        const h = mix(a, b, c, d);
        invariant(h >>> (32 - shardBits) === number, 'residency: a record lies in a wrong shard');
        invariant(this.#find(shard, h, a, b, c, d) === at, 'residency: a record cannot be found');
        invariant(held.get(`${a},${b},${c},${d}`) === tiersOfRecord, 'residency: a record names the wrong tiers');
      }
      invariant(used === shard.count, 'residency: a shard miscounts');
      total += used;
    }
    invariant(total === this.#count && held.size === total, 'residency: a block that a tier holds is not listed');
  }

  #tagOf(namespace: Namespace): Uint32Array {
    let tag = this.#tags.get(namespace.key);
    if (tag === undefined) {
      // Namespaces come from outside: the memory of their tags is bounded, and a tag can be made again.
      if (this.#tags.size >= 4096) this.#tags.clear();
      tag = tagOf(namespace.key);
      this.#tags.set(namespace.key, tag);
    }
    return tag;
  }

  #wordsOf(namespace: Namespace, hash: HashKey): Uint32Array {
    const tag = this.#tagOf(namespace);
    writeWords(hash, this.#one, 0);
    for (let lane = 0; lane < 4; lane++) this.#one[lane]! ^= tag[lane]!;
    return this.#one;
  }

  #record(namespace: Namespace, hash: HashKey): { shard: Shard; at: number } {
    const words = this.#wordsOf(namespace, hash);
    const h = mix(words[0]!, words[1]!, words[2]!, words[3]!);
    const shard = this.#shards[h >>> (32 - shardBits)]!;
    return { shard, at: this.#find(shard, h, words[0]!, words[1]!, words[2]!, words[3]!) };
  }

  /** The chain's first 16 bytes of each hash, aligned. */
  #load(chain: Chain, count: number): Uint32Array {
    if (this.#found.length < count) this.#found = new Uint8Array(count * 2);
    const bytes = 'packed' in chain ? chain.packed.length : count * 16;
    if (this.#packed.length < bytes) {
      this.#words = new Uint32Array((bytes * 2 + 15) >>> 2);
      this.#packed = new Uint8Array(this.#words.buffer);
    }
    if ('packed' in chain) {
      invariant(chain.hashBytes >= 16 && chain.hashBytes % 4 === 0, 'residency: packed hashes of an odd size');
      this.#packed.set(chain.packed);
    } else for (let i = 0; i < count; i++) writeWords(chain[i]!, this.#words, 4 * i);
    return this.#words;
  }

  /** Offset of the record in the shard's words; when there is none, -1 - the offset of the slot that is free for it. */
  #find(shard: Shard, h: number, a: number, b: number, c: number, d: number): number {
    const { words, slots } = shard;
    let at = homeOf(h, slots) * recordWords;
    for (;;) {
      if (words[at + metaAt] === 0) return -1 - at;
      if (words[at] === a && words[at + 1] === b && words[at + 2] === c && words[at + 3] === d) return at;
      at += recordWords;
      if (at === words.length) at = 0;
    }
  }

  #grow(shard: Shard): void {
    const before = shard.words;
    shard.slots += shard.slots >>> 1;
    shard.words = new Uint32Array(shard.slots * recordWords);
    for (let at = 0; at < before.length; at += recordWords) {
      if (before[at + metaAt] !== 0) this.#copy(shard, before, at);
    }
  }

  #copy(shard: Shard, from: Uint32Array, at: number): void {
    const [a, b, c, d] = [from[at]!, from[at + 1]!, from[at + 2]!, from[at + 3]!];
    const free = -1 - this.#find(shard, mix(a, b, c, d), a, b, c, d);
    for (let word = 0; word < recordWords; word++) shard.words[free + word] = from[at + word]!;
  }

  /** Backward shift: what stands further from its home than the hole may take the hole's place. */
  #delete(shard: Shard, at: number): void {
    const { words, slots } = shard;
    let hole = at / recordWords;
    for (let next = hole + 1; ; next++) {
      if (next === slots) next = 0;
      const from = next * recordWords;
      if (words[from + metaAt] === 0) break;
      const home = homeOf(mix(words[from]!, words[from + 1]!, words[from + 2]!, words[from + 3]!), slots);
      if ((next - home + slots) % slots < (next - hole + slots) % slots) continue;
      words.copyWithin(hole * recordWords, from, from + recordWords);
      hole = next;
    }
    words.fill(0, hole * recordWords, (hole + 1) * recordWords);
    shard.count--;
    this.#count--;
  }

  #clear(tiers: number): void {
    for (const shard of this.#shards) {
      const before = shard.words;
      shard.words = new Uint32Array(before.length);
      this.#count -= shard.count;
      shard.count = 0;
      for (let at = 0; at < before.length; at += recordWords) {
        before[at + metaAt]! &= ~tiers;
        if ((before[at + metaAt]! & tiersMask) === 0) continue;
        this.#copy(shard, before, at);
        shard.count++;
      }
      this.#count += shard.count;
    }
  }
}

/** The bits below those that chose the shard, spread over the shard's slots. */
function homeOf(h: number, slots: number): number {
  return ((((h << shardBits) >>> 0) * slots) / 0x1_0000_0000) | 0;
}

/** The first 16 bytes of a hash, little-endian; shorter names (of tests) are padded. */
function writeWords(hash: HashKey, words: Uint32Array, at: number): void {
  for (let lane = 0; lane < 4; lane++) {
    const i = 4 * lane;
    words[at + lane] =
      i + 3 < hash.length
        ? hash.charCodeAt(i) |
          (hash.charCodeAt(i + 1) << 8) |
          (hash.charCodeAt(i + 2) << 16) |
          (hash.charCodeAt(i + 3) << 24)
        : (hash.charCodeAt(i) || 0) | ((hash.charCodeAt(i + 1) || 0) << 8) | ((hash.charCodeAt(i + 2) || 0) << 16);
  }
}
