/**
 * What the S3 tier holds: packs by slot number, and by namespace and hash the place in a pack. In memory only; the bucket is the
 * truth, and discovery follows it.
 *
 * Out of service nothing counts as held; back in service packs count again one after the other, each when followers are told of it.
 *
 * Invariants: a listed entry is in the map and counted in its pack, both or neither; a pack's entries that were removed are not
 * listed again as long as that pack is known here, because its table is read only once; at most `maxBlocks` are listed, as they lie in
 * V8's heap. What is beyond that is left out and counted: of packs that are found; a pack that this node writes has the place of those
 * that were not used for longest.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import { Followers, type Page } from '../kit/followers.ts';
import { Slices, slicing } from '../kit/slices.ts';
import type { Following, TierChange } from '../kit/tier.ts';
import { s3Defaults } from './options.ts';
import type { PackRecord } from './pack-format.ts';

export interface Pack {
  readonly slot: number;
  readonly etag: string;
  readonly bytes: number;
  readonly entries: PackEntry[];
  listedCount: number;
  /** Blocks of it that are not listed for want of room. */
  leftOutCount: number;
  /** On performance.now(), like `lastUseMs`. */
  readonly madeMs: number;
  /** Of any of its blocks, by this node; at first, when it was made. On performance.now(), which nobody sets: below 0 before our time. */
  lastUseMs: number;
  /** Order of uses within one millisecond. */
  tick: number;
  /** The stay in service in which its blocks were told; they count as held in that one only. */
  toldIn: number;
}

export interface PackEntry extends PackRecord {
  readonly pack: Pack;
  listed: boolean;
}

/** Measured: an entry with its name, and its places in the map and in its pack; a pack without its entries. */
const entryBytes = 180;
const packBytes = 480;

/** No pack was told in it. */
const outOfService = -1;

export class PackIndex {
  readonly packs = new Map<number, Pack>();
  readonly #blocks = new Map<string, Map<HashKey, PackEntry>>();
  readonly #followers = new Followers();
  readonly #watches = new Set<Set<number>>();
  readonly #slices = new Slices();
  /** Number of this stay in service. */
  #stay = 1;
  #stays = 1;
  #tick = 0;
  /** Listed, and of these told: those that count as held. */
  count = 0;
  toldCount = 0;
  storedBytes = 0;
  leftOutCount = 0;
  readonly #maxBlocks: number;

  constructor(maxBlocks: number = s3Defaults.maxBlocks) {
    this.#maxBlocks = maxBlocks;
  }

  /** Of V8's heap, about. */
  get bytes(): number {
    return this.count * entryBytes + this.packs.size * packBytes;
  }

  get hidden(): boolean {
    return this.#stay === outOfService;
  }

  get(namespace: Namespace, hash: HashKey): PackEntry | undefined {
    const entry = this.#blocks.get(namespace.key)?.get(hash);
    return entry?.pack.toldIn === this.#stay ? entry : undefined;
  }

  /** Blocks held from the first hash on, without a gap. */
  prefix(namespace: Namespace, hashes: readonly HashKey[]): number {
    const blocks = this.#blocks.get(namespace.key);
    let held = 0;
    while (held < hashes.length && blocks?.get(hashes[held]!)?.pack.toldIn === this.#stay) held++;
    return held;
  }

  follow(listener: (change: TierChange) => void): () => void {
    return this.#followers.follow(listener, this.#held());
  }

  /** Slots whose packs come or go from now on, until `end`. */
  watch(): { readonly slots: Set<number>; end(): void } {
    const slots = new Set<number>();
    this.#watches.add(slots);
    return { slots, end: () => void this.#watches.delete(slots) };
  }

  followInPages(listener: (change: TierChange) => void): Following {
    return this.#followers.followInPages(listener, this.#held());
  }

  /** Nothing counts as held from now on. */
  hide(): void {
    if (this.hidden) return;
    this.#stay = outOfService;
    this.toldCount = 0;
    this.#slices.clear();
    this.#followers.cleared();
  }

  /** Pack after pack counts again, in turns to come. */
  show(): void {
    if (!this.hidden) return;
    this.#stay = ++this.#stays;
    const packs = this.packs.values();
    const next = (): boolean => {
      for (let told = 0; told < slicing.blocks; ) {
        const pack = packs.next();
        if (pack.done === true) return false;
        told += 1 + this.#showPack(pack.value);
      }
      return true;
    };
    if (next()) this.#slices.add(next);
  }

  close(): void {
    this.#slices.clear();
  }

  /**
   * A pack that is in the bucket. A block that another pack holds, too, is found in the one that was made later from now on: the other may be
   * one that this program could not read, and wrote anew. `isOurs`: this node wrote it.
   */
  add(
    found: Pick<Pack, 'slot' | 'etag' | 'bytes' | 'lastUseMs'>,
    records: readonly PackRecord[],
    isOurs = false,
  ): void {
    if (isOurs) this.#makeRoom(records.length);
    invariant(!this.packs.has(found.slot), 's3: a pack slot is taken twice');
    const pack: Pack = {
      slot: found.slot,
      etag: found.etag,
      bytes: found.bytes,
      madeMs: found.lastUseMs,
      lastUseMs: found.lastUseMs,
      entries: [],
      listedCount: 0,
      leftOutCount: 0,
      tick: ++this.#tick,
      toldIn: this.hidden ? 0 : this.#stay,
    };
    this.packs.set(pack.slot, pack);
    for (const slots of this.#watches) slots.add(pack.slot);
    this.storedBytes += pack.bytes;
    const news = new Map<string, { namespace: Namespace; hashes: HashKey[] }>();
    for (const record of records) {
      const { namespace, hash, offset, bytes } = record;
      let blocks = this.#blocks.get(namespace.key);
      const before = blocks?.get(hash);
      if (before !== undefined && pack.madeMs < before.pack.madeMs) continue;
      if (before === undefined && this.count >= this.#maxBlocks) {
        pack.leftOutCount++;
        this.leftOutCount++;
        continue;
      }
      // A literal: one that is spread takes half as much again.
      const entry: PackEntry = { namespace, hash, offset, bytes, pack, listed: true };
      if (blocks === undefined) {
        blocks = new Map();
        this.#blocks.set(namespace.key, blocks);
      }
      const wasHeld = before !== undefined && this.#isHeld(before.pack);
      if (before !== undefined) this.#uncount(before);
      if (!wasHeld) {
        const told = news.get(namespace.key) ?? { namespace, hashes: [] };
        news.set(namespace.key, told);
        told.hashes.push(hash);
      }
      blocks.set(hash, entry);
      pack.entries.push(entry);
      pack.listedCount++;
      this.count++;
      if (!this.hidden) this.toldCount++;
    }
    if (!this.hidden) for (const { namespace, hashes } of news.values()) this.#followers.stored(namespace, hashes);
  }

  touch(pack: Pack): void {
    pack.lastUseMs = performance.now();
    pack.tick = ++this.#tick;
  }

  /** Unlist one block. */
  remove(entry: PackEntry): void {
    if (!entry.listed) return;
    const wasHeld = this.#isHeld(entry.pack);
    this.#unlist(entry);
    if (wasHeld) this.#followers.removed(entry.namespace, [entry.hash]);
  }

  /** The pack is gone, or about to go. Returns how many listed blocks went with it. */
  drop(pack: Pack): number {
    invariant(this.packs.get(pack.slot) === pack, 's3: a pack is not where it says');
    this.packs.delete(pack.slot);
    for (const slots of this.#watches) slots.add(pack.slot);
    this.storedBytes -= pack.bytes;
    this.leftOutCount -= pack.leftOutCount;
    return this.#unlistAll(pack);
  }

  /** The pack that was not used for the longest time, of those that `mayGo`. */
  coldest(mayGo: (pack: Pack) => boolean): Pack | undefined {
    let coldest: Pack | undefined;
    for (const pack of this.packs.values()) {
      if (!mayGo(pack)) continue;
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
    let leftOut = 0;
    for (const { leftOutCount } of this.packs.values()) leftOut += leftOutCount;
    invariant(leftOut === this.leftOutCount && listed <= this.#maxBlocks, 's3: the bound of the index does not hold');
    let indexed = 0;
    for (const blocks of this.#blocks.values()) indexed += blocks.size;
    let held = 0;
    for (const pack of this.packs.values()) if (pack.toldIn === this.#stay) held += pack.listedCount;
    invariant(listed === this.count && indexed === this.count, 's3: index and packs disagree');
    invariant(held === this.toldCount, 's3: the blocks that count as held are miscounted');
    invariant(bytes === this.storedBytes, 's3: the bytes of the packs are miscounted');
  }

  /** Pack by pack; what comes meanwhile, or moves, lies in a pack that is still to come. */
  *#held(): Generator<Page, void> {
    for (const pack of this.packs.values()) {
      if (pack.toldIn !== this.#stay) continue;
      for (const [namespace, hashes] of pagesOf(pack)) {
        const held = hashes.filter((hash) => this.get(namespace, hash)?.pack === pack);
        if (held.length > 0) yield [namespace, held];
      }
    }
  }

  #makeRoom(count: number): void {
    while (this.count + count > this.#maxBlocks) {
      const coldest = this.coldest(({ listedCount }) => listedCount > 0);
      if (coldest === undefined) return;
      const unlisted = this.#unlistAll(coldest);
      coldest.leftOutCount += unlisted;
      this.leftOutCount += unlisted;
      coldest.entries.length = 0;
    }
  }

  /** Returns how many they were. */
  #unlistAll(pack: Pack): number {
    const listed = pack.entries.filter((entry) => entry.listed);
    const told = this.#isHeld(pack) ? pagesOf(pack) : [];
    for (const entry of listed) this.#unlist(entry);
    for (const [namespace, hashes] of told) this.#followers.removed(namespace, hashes);
    return listed.length;
  }

  #isHeld(pack: Pack): boolean {
    return pack.toldIn === this.#stay;
  }

  /** Returns of how many blocks followers were told. */
  #showPack(pack: Pack): number {
    if (pack.toldIn === this.#stay) return 0;
    pack.toldIn = this.#stay;
    this.toldCount += pack.listedCount;
    for (const [namespace, hashes] of pagesOf(pack)) this.#followers.stored(namespace, hashes);
    return pack.listedCount;
  }

  #unlist(entry: PackEntry): void {
    const blocks = this.#blocks.get(entry.namespace.key)!;
    blocks.delete(entry.hash);
    if (blocks.size === 0) this.#blocks.delete(entry.namespace.key);
    this.#uncount(entry);
  }

  #uncount(entry: PackEntry): void {
    if (this.#isHeld(entry.pack)) this.toldCount--;
    entry.listed = false;
    entry.pack.listedCount--;
    this.count--;
  }
}

/** Its listed blocks, by namespace. */
function pagesOf(pack: Pack): Iterable<Page> {
  const pages = new Map<Namespace, HashKey[]>();
  for (const { namespace, hash, listed } of pack.entries) {
    if (!listed) continue;
    const page = pages.get(namespace);
    if (page === undefined) pages.set(namespace, [hash]);
    else page.push(hash);
  }
  return pages;
}
