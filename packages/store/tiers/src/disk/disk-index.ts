/**
 * What the disk tier holds, over all its devices: by namespace and hash, a row that says where. In memory only (about 76
 * bytes a block); recovery rebuilds it. Invariant: a block is listed in the table and counted in its segment, or neither.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import { Followers, pagesOfRows } from '../kit/followers.ts';
import { Slices, slicing } from '../kit/slices.ts';
import type { Following, TierChange } from '../kit/tier.ts';
import { type EntryNumber, EntryTable, noEntry } from './entry-table.ts';
import type { FoundBlock } from './recovery.ts';
import type { Segment } from './segment.ts';

/** Namespaces that may be known before the empty ones among them are forgotten. */
const leastSweep = 64;

interface NamespaceRow {
  readonly namespace: Namespace;
  count: number;
}

export class DiskIndex {
  readonly table = new EntryTable();
  readonly #numbers = new Map<string, number>();
  readonly #namespaces: (NamespaceRow | undefined)[] = [];
  readonly #freeNamespaces: number[] = [];
  readonly #segments: (Segment | undefined)[] = [];
  readonly #freeSegments: number[] = [];
  readonly #followers = new Followers();
  #sweepAt = leastSweep;
  /** Of the namespace that was asked for last: many blocks of one namespace come in a row. */
  #latestKey = '';
  #latestNumber = -1;
  /** The logical clock of recency. */
  #tick = 0;
  readonly #slices = new Slices();
  readonly #onDisplaced: (segment: Segment, page: number, pages: number) => void;
  /** Drops that have not come to their end. */
  readonly #drops = new Set<Promise<void>>();
  /** Nothing is listed for anybody any more: what drops still have to unlist is not found and not told of. */
  #isCleared = false;

  /** `onDisplaced`: a block is listed elsewhere from now on, and this copy of it must not come back when that one is removed. */
  constructor(onDisplaced: (segment: Segment, page: number, pages: number) => void = () => {}) {
    this.#onDisplaced = onDisplaced;
  }

  get count(): number {
    return this.#isCleared ? 0 : this.table.count;
  }

  get tick(): number {
    return this.#tick;
  }

  /** Recency goes on from where a former life stopped. */
  advance(tick: number): void {
    this.#tick = Math.max(this.#tick, tick);
  }

  get(namespace: Namespace, hash: HashKey): EntryNumber {
    const number = this.#isCleared ? undefined : this.#numbers.get(namespace.key);
    return number === undefined ? noEntry : this.table.find(number, hash);
  }

  /** How many hashes, from the first on, are listed without a gap. */
  prefix(namespace: Namespace, hashes: readonly HashKey[]): number {
    const number = this.#isCleared ? undefined : this.#numbers.get(namespace.key);
    if (number === undefined) return 0;
    let held = 0;
    while (held < hashes.length && this.table.find(number, hashes[held]!) !== noEntry) held++;
    return held;
  }

  segmentOf(entry: EntryNumber): Segment {
    return this.#segments[this.table.segment(entry)]!;
  }

  /** Of a listed row. */
  namespaceOf(entry: EntryNumber): Namespace {
    return this.#namespaces[this.table.namespace(entry)]!.namespace;
  }

  follow(listener: (change: TierChange) => void): () => void {
    return this.#followers.follow(listener, this.#held());
  }

  followInPages(listener: (change: TierChange) => void): Following {
    return this.#followers.followInPages(listener, pagesOfRows(this));
  }

  get rowCount(): number {
    return this.table.rowCount;
  }

  namespaceOfRow(row: EntryNumber): Namespace | undefined {
    return !this.#isCleared && this.table.isListed(row) ? this.namespaceOf(row) : undefined;
  }

  hashOfRow(row: EntryNumber): HashKey {
    return this.table.hash(row);
  }

  endOfRow(row: EntryNumber): number {
    return this.table.expiresS(row);
  }

  /** A segment whose blocks are to be listed; balanced by `unregister`. */
  register(segment: Segment): void {
    segment.number = this.#freeSegments.pop() ?? this.#segments.length;
    this.#segments[segment.number] = segment;
  }

  unregister(segment: Segment): void {
    this.clear(segment);
    this.#segments[segment.number] = undefined;
    this.#freeSegments.push(segment.number);
  }

  /** List a block; one of the same name before it is forgotten. `lastUse` keeps a recency from before; `expiresS`: its end. */
  add(
    namespace: Namespace,
    hash: HashKey,
    segment: Segment,
    page: number,
    pages: number,
    lastUse?: number,
    expiresS = 0,
  ): EntryNumber {
    const number = this.#numberOf(namespace);
    return this.#add(number, this.table.find(number, hash), segment, page, pages, lastUse, expiresS);
  }

  /**
   * `add` of what recovery found: the hash lies in words. Devices are listed at once: of a block that two of them have, the later used one
   * stays. The other may be one that this program could not read, and made anew since. `noEntry`: it is this one.
   */
  restore(namespace: Namespace, block: FoundBlock, segment: Segment, lastUse: number | undefined): EntryNumber {
    const number = this.#numberOf(namespace);
    const before = this.table.findWords(number, block.words, block.at, block.hashBytes);
    const isElsewhere = before !== noEntry && this.segmentOf(before).device !== segment.device;
    if (isElsewhere && lastUse !== undefined && lastUse < this.table.lastUse(before)) {
      this.#onDisplaced(segment, block.page, block.pages);
      return noEntry;
    }
    return this.#add(number, before, segment, block.page, block.pages, lastUse, block.expiresS);
  }

  #add(
    number: number,
    before: EntryNumber,
    segment: Segment,
    page: number,
    pages: number,
    lastUse: number | undefined,
    expiresS: number,
  ) {
    const { table } = this;
    if (before !== noEntry) {
      this.#unlist(before);
      this.#onDisplaced(this.segmentOf(before), table.page(before), table.pages(before));
    }
    const use = lastUse ?? ++this.#tick;
    this.advance(use);
    const entry = table.add(number, segment.number, page, pages);
    table.setLastUse(entry, use);
    table.setExpiresS(entry, expiresS);
    const row = this.#namespaces[number]!;
    row.count++;
    if (segment.last === noEntry) segment.first = entry;
    else table.setNext(segment.last, entry);
    segment.last = entry;
    table.setNext(entry, noEntry);
    segment.listedCount++;
    if (before !== noEntry) this.#followers.moved(row.namespace, () => table.hash(entry), expiresS);
    else if (!this.#followers.none) this.#followers.stored(row.namespace, [table.hash(entry)], [expiresS]);
    return entry;
  }

  touch(entry: EntryNumber): void {
    this.table.setLastUse(entry, ++this.#tick);
    this.table.setHot(entry);
  }

  remove(entry: EntryNumber): void {
    const namespace = this.namespaceOf(entry);
    this.#unlist(entry);
    if (!this.#followers.none && !this.#isCleared) this.#followers.removed(namespace, [this.table.hash(entry)]);
  }

  /**
   * Unlist all blocks of segments whose device is gone, in slices: until its slice has come a block is listed, and cannot be read.
   * Where nothing else is listed it is said in one word, and at once; `mayClear`: nothing is to be listed before it has been dropped.
   */
  drop(lost: Iterable<Segment>, mayClear: boolean): void {
    const segments = [...lost];
    const listed = segments.reduce((sum, { listedCount }) => sum + listedCount, 0);
    if (mayClear && listed === this.table.count) {
      this.#isCleared = true;
      this.#followers.cleared();
    }
    const unlisting = this.#unlisting(segments);
    const drop = new Promise<void>((resolve) => {
      const next = (): boolean => {
        if (unlisting.next().done !== true) return true;
        resolve();
        return false;
      };
      if (next()) this.#slices.add(next);
    }).then(() => {
      this.#drops.delete(drop);
      if (this.#drops.size === 0) this.#isCleared = false;
    });
    this.#drops.add(drop);
  }

  /** Resolves when all that was dropped is unlisted. */
  async dropped(): Promise<void> {
    while (this.#drops.size > 0) await Promise.all(this.#drops);
  }

  /** `drop` up to the end of each slice. */
  *#unlisting(segments: readonly Segment[]): Generator<void> {
    let left = slicing.blocks;
    for (const segment of segments) {
      if (segment.listedCount === 0) continue; // the rows that it has were unlisted before
      let names = new Map<Namespace, HashKey[]>();
      const tell = (): void => {
        for (const [namespace, hashes] of names) if (!this.#isCleared) this.#followers.removed(namespace, hashes);
        names = new Map();
      };
      for (const entry of this.listedOf(segment)) {
        if (!this.#followers.none && !this.#isCleared) {
          const namespace = this.namespaceOf(entry);
          const hashes = names.get(namespace);
          if (hashes === undefined) names.set(namespace, [this.table.hash(entry)]);
          else hashes.push(this.table.hash(entry));
        }
        this.#unlist(entry);
        if (--left <= 0) {
          tell();
          left = slicing.blocks;
          yield;
        }
        if (segment.listedCount === 0) break; // its other rows were unlisted before, and may be others' now
      }
      tell();
    }
  }

  /** Listed rows of a segment in order of their places. */
  *listedOf(segment: Segment): Generator<EntryNumber> {
    for (let entry = segment.first; entry !== noEntry; entry = this.table.next(entry)) {
      if (this.table.isListed(entry)) yield entry;
    }
  }

  /** Give back the rows of a segment that lists nothing any more and has nothing in flight. */
  clear(segment: Segment): void {
    invariant(segment.listedCount === 0, 'disk: a segment is cleared that still lists blocks');
    for (let entry = segment.first; entry !== noEntry; ) {
      const next = this.table.next(entry);
      this.table.release(entry);
      entry = next;
    }
    segment.first = noEntry;
    segment.last = noEntry;
  }

  checkIntegrity(segments: Iterable<Segment>): void {
    const { table } = this;
    let listed = 0;
    for (const segment of segments) {
      let live = 0;
      for (const entry of this.listedOf(segment)) {
        live++;
        invariant(this.segmentOf(entry) === segment, 'disk: a row names another segment');
        invariant(table.find(table.namespace(entry), table.hash(entry)) === entry, 'disk: a block is not in the index');
        invariant((table.page(entry) + table.pages(entry)) * 4096 <= segment.tail, 'disk: a block is beyond the tail');
      }
      invariant(live === segment.listedCount, 'disk: a segment miscounts its blocks');
      invariant(segment.state !== 'free' || live === 0, 'disk: a free segment lists blocks');
      listed += live;
    }
    const inNamespaces = this.#namespaces.reduce((sum, row) => sum + (row?.count ?? 0), 0);
    invariant(listed === table.count && inNamespaces === listed, 'disk: index and segments disagree');
  }

  *#held(): Generator<readonly [Namespace, readonly HashKey[], readonly number[]]> {
    if (this.#isCleared) return;
    for (const segment of this.#segments) if (segment !== undefined) yield* this.#namesOf(segment);
  }

  /** Blocks of a segment with their ends, by namespace. */
  #namesOf(segment: Segment): readonly (readonly [Namespace, HashKey[], number[]])[] {
    const names = new Map<Namespace, readonly [Namespace, HashKey[], number[]]>();
    for (const entry of this.listedOf(segment)) {
      const namespace = this.namespaceOf(entry);
      let own = names.get(namespace);
      if (own === undefined) {
        own = [namespace, [], []];
        names.set(namespace, own);
      }
      own[1].push(this.table.hash(entry));
      own[2].push(this.table.expiresS(entry));
    }
    return [...names.values()];
  }

  #numberOf(namespace: Namespace): number {
    const { key } = namespace;
    if (key === this.#latestKey) return this.#latestNumber;
    let number = this.#numbers.get(key);
    if (number === undefined) {
      if (this.#numbers.size >= this.#sweepAt) this.#sweep();
      number = this.#freeNamespaces.pop() ?? this.#namespaces.length;
      this.#namespaces[number] = { namespace, count: 0 };
      this.#numbers.set(key, number);
    }
    this.#latestKey = key;
    this.#latestNumber = number;
    return number;
  }

  /** Forget namespaces of which nothing is listed. */
  #sweep(): void {
    this.#latestKey = '';
    for (const [key, number] of this.#numbers) {
      if (this.#namespaces[number]!.count > 0) continue;
      this.#numbers.delete(key);
      this.#namespaces[number] = undefined;
      this.#freeNamespaces.push(number);
    }
    this.#sweepAt = Math.max(leastSweep, 2 * this.#numbers.size);
  }

  #unlist(entry: EntryNumber): void {
    this.table.unlist(entry);
    this.segmentOf(entry).listedCount--;
    this.#namespaces[this.table.namespace(entry)]!.count--;
  }
}
