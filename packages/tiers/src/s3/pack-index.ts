/**
 * What the S3 tier holds: packs by slot number, and by namespace and hash the place in a pack. In memory only; the bucket is the
 * truth, and discovery follows it.
 *
 * Invariant: a listed entry is in the map and counted in its pack, both or neither; a pack's entries that were removed are not
 * listed again as long as that pack lives, because its table is read only once.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import { Followers } from '../followers.ts';
import type { TierChange } from '../tier.ts';
import type { PackRecord } from './pack-format.ts';

export interface Pack {
  readonly slot: number;
  readonly etag: string;
  readonly bytes: number;
  readonly entries: PackEntry[];
  listedCount: number;
  /** Of any of its blocks, by this node; at first, when it was made. On performance.now(), which nobody sets: below 0 before our time. */
  lastUseMs: number;
  /** Order of uses within one millisecond. */
  tick: number;
}

export interface PackEntry extends PackRecord {
  readonly pack: Pack;
  listed: boolean;
}

export class PackIndex {
  readonly packs = new Map<number, Pack>();
  readonly #blocks = new Map<string, Map<HashKey, PackEntry>>();
  readonly #followers = new Followers();
  readonly #watches = new Set<Set<number>>();
  /** Out of service: what is known counts as not held. */
  #hidden = false;
  #tick = 0;
  count = 0;
  storedBytes = 0;

  get hidden(): boolean {
    return this.#hidden;
  }

  get(namespace: Namespace, hash: HashKey): PackEntry | undefined {
    return this.#hidden ? undefined : this.#blocks.get(namespace.key)?.get(hash);
  }

  of(namespace: Namespace): ReadonlyMap<HashKey, PackEntry> | undefined {
    return this.#hidden ? undefined : this.#blocks.get(namespace.key);
  }

  follow(listener: (change: TierChange) => void): () => void {
    return this.#followers.follow(listener, this.#hidden ? [] : this.#held());
  }

  /** Slots whose packs come or go from now on, until `end`. */
  watch(): { readonly slots: Set<number>; end(): void } {
    const slots = new Set<number>();
    this.#watches.add(slots);
    return { slots, end: () => void this.#watches.delete(slots) };
  }

  hide(): void {
    if (this.#hidden) return;
    this.#hidden = true;
    this.#followers.cleared();
  }

  show(): void {
    if (!this.#hidden) return;
    this.#hidden = false;
    for (const [namespace, hashes] of this.#held()) this.#followers.stored(namespace, hashes);
  }

  /** A pack that is in the bucket. A block that another pack holds, too, is found in this one from now on. */
  add(found: Pick<Pack, 'slot' | 'etag' | 'bytes' | 'lastUseMs'>, records: readonly PackRecord[]): void {
    invariant(!this.packs.has(found.slot), 's3: a pack slot is taken twice');
    const pack: Pack = { ...found, entries: [], listedCount: 0, tick: ++this.#tick };
    this.packs.set(pack.slot, pack);
    for (const slots of this.#watches) slots.add(pack.slot);
    this.storedBytes += pack.bytes;
    const news = new Map<string, { namespace: Namespace; hashes: HashKey[] }>();
    for (const record of records) {
      const { namespace, hash } = record;
      const entry: PackEntry = { ...record, pack, listed: true };
      let blocks = this.#blocks.get(namespace.key);
      if (blocks === undefined) {
        blocks = new Map();
        this.#blocks.set(namespace.key, blocks);
      }
      const before = blocks.get(hash);
      if (before !== undefined) this.#uncount(before);
      else {
        const told = news.get(namespace.key) ?? { namespace, hashes: [] };
        news.set(namespace.key, told);
        told.hashes.push(hash);
      }
      blocks.set(hash, entry);
      pack.entries.push(entry);
      pack.listedCount++;
      this.count++;
    }
    if (!this.#hidden) for (const { namespace, hashes } of news.values()) this.#followers.stored(namespace, hashes);
  }

  touch(pack: Pack): void {
    pack.lastUseMs = performance.now();
    pack.tick = ++this.#tick;
  }

  /** Unlist one block. */
  remove(entry: PackEntry): void {
    if (!entry.listed) return;
    this.#unlist(entry);
    if (!this.#hidden) this.#followers.removed(entry.namespace, [entry.hash]);
  }

  /** The pack is gone, or about to go. Returns how many listed blocks went with it. */
  drop(pack: Pack): number {
    invariant(this.packs.get(pack.slot) === pack, 's3: a pack is not where it says');
    this.packs.delete(pack.slot);
    for (const slots of this.#watches) slots.add(pack.slot);
    this.storedBytes -= pack.bytes;
    const listed = pack.entries.filter((entry) => entry.listed);
    for (const entry of listed) this.remove(entry);
    return listed.length;
  }

  /** The pack that was not used for the longest time. */
  coldest(): Pack | undefined {
    let coldest: Pack | undefined;
    for (const pack of this.packs.values()) {
      const isColder =
        coldest === undefined ||
        pack.lastUseMs < coldest.lastUseMs ||
        (pack.lastUseMs === coldest.lastUseMs && pack.tick < coldest.tick);
      if (isColder) coldest = pack;
    }
    return coldest;
  }

  checkIntegrity(): void {
    let listed = 0;
    let bytes = 0;
    for (const [slot, pack] of this.packs) {
      const live = pack.entries.filter((entry) => entry.listed);
      invariant(pack.slot === slot && live.length === pack.listedCount, 's3: a pack miscounts its blocks');
      for (const entry of live) {
        invariant(
          this.#blocks.get(entry.namespace.key)?.get(entry.hash) === entry,
          's3: a listed block is not in the index',
        );
      }
      listed += live.length;
      bytes += pack.bytes;
    }
    let indexed = 0;
    for (const blocks of this.#blocks.values()) indexed += blocks.size;
    invariant(listed === this.count && indexed === this.count, 's3: index and packs disagree');
    invariant(bytes === this.storedBytes, 's3: the bytes of the packs are miscounted');
  }

  *#held(): Iterable<readonly [Namespace, readonly HashKey[]]> {
    for (const blocks of this.#blocks.values()) {
      const [first] = blocks.values();
      if (first !== undefined) yield [first.namespace, [...blocks.keys()]];
    }
  }

  #unlist(entry: PackEntry): void {
    const blocks = this.#blocks.get(entry.namespace.key)!;
    blocks.delete(entry.hash);
    if (blocks.size === 0) this.#blocks.delete(entry.namespace.key);
    this.#uncount(entry);
  }

  #uncount(entry: PackEntry): void {
    entry.listed = false;
    entry.pack.listedCount--;
    this.count--;
  }
}
