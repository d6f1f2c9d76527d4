/**
 * The index of a cluster: which worker holds which block, on which medium, for routers. Fed by block events; asked for the
 * length of the prefix that each target can use.
 *
 * A chain hash names its block and all blocks before it. So blocks that were announced one after another form a run
 * (`run.ts`), and when the hash at some place of a run is the prompt's, all before it are, too (`folds.ts` sees to it that nobody's lies
 * make it otherwise): a prompt of 6,000 blocks is matched with two look-ups per run and a binary search where it leaves one, not with 6,000. Who holds a stretch is one
 * number (`source-sets.ts`), so that a copy on another worker costs no memory where whole stretches are shared.
 *
 *     hash ──▶ record (run, place) ──▶ run ──▶ segment ──▶ set ──▶ media of each source
 *
 * Order is believed only while nobody contradicts it: a block that is announced after two different parents becomes loose (a
 * record without a run) and is looked up by itself. Announcements without an order (tiers know hashes only) are loose, too, until
 * a prompt or an event tells their order (`learn`).
 *
 * Bounded: `maxBytes` of memory. When it is reached, the runs that were not used for the longest time go, a few records with each
 * block that comes; where holders become many faster than that, the further ones are left out. The index may then lack blocks, but
 * names none that its holder has dropped. It is a hint: whoever imports a block verifies it.
 * (After SGLang's radix tree and Dynamo's positional index; sets by hash consing are our own.)
 */
import { invariant, KvError } from '@kvtier/errors';
import { Chains, type ChangeOfSet, loose } from './chains.ts';
import { maxMedia } from './clears.ts';
import { mostRecords, none } from './hash-table.ts';
import type { Keys } from './keys.ts';
import { type Match, Matcher } from './match.ts';
import { empty } from './run.ts';
import { mostSources } from './source-sets.ts';
import { Space } from './space.ts';
import { type Target, Targets } from './targets.ts';

export type { Keys, Match };

/** The hash before the first one of an event; 'root': there is none; 'unknown': hashes without an order. */
export type Parent = Keys | 'root' | 'unknown';

export interface KvIndexOptions {
  readonly maxBytes: number;
  /** Publishers that can be told apart at a time, 4,096 at most. Memory is taken for as many as there were at a time. */
  readonly maxSources?: number;
  /**
   * Media, a bit each, on which one publisher may hold a block several times, so that it is gone when it was removed as often as stored
   * (an engine's block pool); on the others what was stored twice is there once. Default: all.
   */
  readonly countedMedia?: number;
}

export interface KvIndexStats {
  readonly blocks: number;
  readonly bytes: number;
  readonly runs: number;
  readonly sets: number;
  /** Left out for want of space. */
  readonly droppedBlocks: number;
  /** Removals of what was never stored here: from before we listened, or left out. */
  readonly unknownRemovals: number;
  /** Announcements of one block after two different parents. */
  readonly conflicts: number;
}

/** Of `maxBytes`, for records; the rest is for runs and sets. */
const recordShare = 0.75;
/** A record with its place in a table that is at least 53 % full. */
const recordBytes = 28;
/** Empty tables, and the part of a chunk of records that is not in use yet. */
const fixedBytes = 128 * 1024;
const minBytes = 4 * fixedBytes;

const always = (): boolean => true;

const boundsOf = (maxBytes: number) => ({
  records: Math.min(Math.floor((maxBytes * recordShare - fixedBytes) / recordBytes), mostRecords),
  restBytes: maxBytes * (1 - recordShare),
});

export class KvIndex {
  readonly #chains: Chains;
  readonly #space: Space;
  readonly #matcher: Matcher;
  readonly #sources: boolean[] = [];
  readonly #maxSources: number;
  #sourceCount = 0;
  readonly #counts = { unknownRemovals: 0, conflicts: 0 };
  #clock = 0;
  readonly #hasRoom = (): boolean => this.#chains.hasRoom;

  /** @throws KvError CONFIG when the bound is too small for anything */
  constructor({ maxBytes, maxSources = mostSources, countedMedia = 0xff }: KvIndexOptions) {
    if (!(maxBytes >= minBytes))
      throw new KvError('CONFIG', `KV index: ${maxBytes} bytes are too few; ask for ${minBytes} or more`);
    this.#maxSources = maxSources;
    const { records, restBytes } = boundsOf(maxBytes);
    this.#chains = new Chains(records, restBytes, maxSources, countedMedia);
    this.#space = new Space(this.#chains);
    this.#matcher = new Matcher(this.#chains);
  }

  /** Another bound from now on. False: it has taken more than that already, and stays as it was (memory is not given back piece by piece). */
  resize(maxBytes: number): boolean {
    const { records, restBytes } = boundsOf(maxBytes);
    const { table } = this.#chains;
    if (maxBytes < minBytes || table.used > records || this.#chains.restBytes > restBytes) return false;
    table.maxRecords = records;
    this.#space.resize(restBytes);
    return true;
  }

  /** Publishers that are told apart. */
  get sourceCount(): number {
    return this.#sourceCount;
  }

  /** Publishers that there is room for beside those that there are. */
  get freeSources(): number {
    return this.#maxSources - this.#sourceCount;
  }

  /** A number for a publisher, the lowest that is free. @throws KvError CONFIG when there are too many */
  addSource(): number {
    if (this.freeSources === 0)
      throw new KvError(
        'CONFIG',
        `KV index: ${this.#maxSources} publishers are told apart at most, and there are more`,
      );
    let source = 0;
    while (this.#sources[source]) source++;
    this.#chains.sets.admit(source);
    this.#sources[source] = true;
    this.#sourceCount++;
    return source;
  }

  /** The publisher is gone: nothing of it counts from now on, and its number may be given away again. */
  removeSource(source: number): void {
    this.cleared(source);
    if (this.#sources[source]) this.#sourceCount--;
    this.#sources[source] = false;
  }

  /** All that this source holds, on one medium or on all, is gone. O(1): sets and records follow in later turns (`sweep`). */
  cleared(source: number, medium?: number): void {
    this.#chains.sets.clear(source, medium);
    this.#space.sweepAll();
  }

  /** This source holds these blocks now, one copy more of each. */
  stored(source: number, medium: number, keys: Keys, parent: Parent): void {
    invariant(this.#sources[source] && medium < maxMedia, 'KV index: no such source or medium');
    const stamp = ++this.#clock;
    const { sets } = this.#chains;
    const add: ChangeOfSet = (set, blocks) => {
      // Without room, who holds it besides is not told. A block that nobody held is: its holder's own set is one for all such blocks.
      const to =
        sets.with(set, source, medium, this.#hasRoom) ??
        (sets.isEmpty(set) ? sets.with(empty, source, medium, always) : undefined);
      if (to === undefined) this.#space.droppedBlocks += blocks;
      return to ?? sets.latest(set);
    };
    if (parent === 'unknown') this.#storeLoose(keys, add);
    else this.#storeChain(keys, parent, stamp, add);
    this.#space.came(keys.length / 2);
  }

  /** One copy less of each. */
  removed(source: number, medium: number, keys: Keys): void {
    const remove: ChangeOfSet = (set, blocks) => {
      const to = this.#chains.sets.without(set, source, medium, this.#hasRoom);
      // Without room, the block goes: nobody may be credited with what he has dropped.
      if (to === undefined) this.#space.droppedBlocks += blocks;
      return to ?? empty;
    };
    const holder = 1 << medium;
    for (let at = 0; at < keys.length; at += 2) {
      const record = this.#chains.table.find(keys[at]!, keys[at + 1]!);
      const set = record === none ? empty : this.#chains.latestOf(record);
      if ((this.#chains.sets.mediaOf(set, source) & holder) === 0) {
        this.#counts.unknownRemovals++;
        continue;
      }
      this.#chains.change(record, remove);
      if (this.#chains.setOf(record) === empty) this.#chains.drop(record);
    }
    this.#space.changed(keys.length / 2);
  }

  /** A prompt's blocks in their order, from the root or from a part before them on: what is known of them without an order gets one. */
  learn(keys: Keys, parent: Keys | 'root' = 'root'): void {
    if (keys.length === 0) return;
    this.#storeChain(keys, parent, ++this.#clock, undefined);
  }

  /** Blocks that `match` had to look up one by one, as nothing was known of their order: `learn` helps. */
  get looseSteps(): number {
    return this.#matcher.looseSteps;
  }

  /** What sets of holders have cost so far, in blocks stored that have none of their own. */
  get setWork(): number {
    return this.#chains.sets.work;
  }

  /** How much of the prompt each target has at hand, from the first block on. Who asks for the same targets again keeps `Targets`. */
  match(keys: Keys, asked: readonly Target[] | Targets): Match[] {
    return this.#matcher.match(keys, asked instanceof Targets ? asked : new Targets(asked), ++this.#clock);
  }

  /**
   * How many of the blocks directly before block `end` a target has, without a gap, at most `most`: what attention that sees a window of
   * the last tokens needs.
   */
  heldBefore(keys: Keys, end: number, most: number, target: Target): number {
    let held = 0;
    for (; held < most && held < end; held++) {
      const at = 2 * (end - 1 - held);
      if (!this.isHeld(keys[at]!, keys[at + 1]!, target)) break;
    }
    return held;
  }

  /** Blocks up to the last one that anybody may have: behind it nobody has any. One look-up for each block behind it. */
  endOfHeld(keys: Keys): number {
    const { table } = this.#chains;
    let end = keys.length / 2;
    for (; end > 0; end--) {
      const record = table.find(keys[2 * end - 2]!, keys[2 * end - 1]!);
      if (record !== none && this.#chains.latestOf(record) !== empty) break;
    }
    return end;
  }

  /** This target has this block, wherever that is. */
  isHeld(low: number, high: number, { sources }: Target): boolean {
    const record = this.#chains.table.find(low, high);
    const set = record === none ? empty : this.#chains.latestOf(record);
    return sources.some((source) => this.#chains.sets.mediaOf(set, source) !== 0);
  }

  /** Somebody has this block. */
  isHeldByAny(low: number, high: number): boolean {
    const record = this.#chains.table.find(low, high);
    return record !== none && !this.#chains.sets.isEmpty(this.#chains.latestOf(record));
  }

  /** Media of every source that holds this block, by source. For tests and for tools. */
  holdersOf(low: number, high: number): Uint8Array {
    const record = this.#chains.table.find(low, high);
    const bits = this.#chains.sets.bitsOf(record === none ? empty : this.#chains.setOf(record));
    const media = new Uint8Array(Math.max(bits.length, this.#sources.length));
    media.set(bits);
    return media;
  }

  /** Gives back up to so many records that nobody holds. Returns whether there is more to do; to be called now and then. */
  sweep(records?: number): boolean {
    return this.#space.sweep(records);
  }

  stats(): KvIndexStats {
    const { table, sets, runCount, restBytes } = this.#chains;
    return {
      blocks: table.count,
      bytes: table.bytes + restBytes,
      runs: runCount,
      sets: sets.count,
      droppedBlocks: this.#space.droppedBlocks,
      ...this.#counts,
    };
  }

  /** Throws InvariantError unless records, runs and sums agree. O(records). */
  checkIntegrity(): void {
    this.#chains.checkIntegrity();
  }

  #storeLoose(keys: Keys, add: ChangeOfSet): void {
    for (let at = 0; at < keys.length; at += 2) {
      const record = this.#chains.table.find(keys[at]!, keys[at + 1]!);
      if (record !== none) this.#chains.change(record, add);
      else {
        this.#space.makeRoom();
        this.#chains.table.insert(keys[at]!, keys[at + 1]!, loose, add(empty, 1));
      }
    }
  }

  /** Without `add`, nothing is stored: only the order is told. */
  #storeChain(keys: Keys, parent: Keys | 'root', stamp: number, add: ChangeOfSet | undefined): void {
    let low = parent === 'root' ? 0 : parent[0]!;
    let high = parent === 'root' ? 0 : parent[1]!;
    let before = parent === 'root' ? none : this.#chains.table.find(low, high);
    for (let at = 0; at < keys.length; ) {
      const stretch = before === none ? 0 : this.#chains.stretch(keys, at, before);
      if (stretch > 0) {
        const run = this.#chains.runs[this.#chains.table.runOf(before)]!;
        const place = this.#chains.table.placeOf(before) + 1;
        if (add !== undefined) this.#chains.update(run, place, place + stretch, add);
        run.stamp = stamp;
        at += 2 * stretch;
      } else {
        this.#storeOne(keys, at, before, low, high, stamp, add);
        at += 2;
      }
      low = keys[at - 2]!;
      high = keys[at - 1]!;
      before = this.#chains.table.find(low, high);
    }
  }

  #storeOne(
    keys: Keys,
    at: number,
    before: number,
    low: number,
    high: number,
    stamp: number,
    add: ChangeOfSet | undefined,
  ): void {
    const record = this.#chains.table.find(keys[at]!, keys[at + 1]!);
    if (record === none) {
      if (add === undefined) return;
      this.#space.makeRoom();
      const fresh = this.#chains.table.insert(keys[at]!, keys[at + 1]!, loose, empty);
      // Making room may have taken the record of the block before.
      this.#chains.follow(
        fresh,
        add(empty, 1),
        before === none ? none : this.#chains.table.find(low, high),
        low,
        high,
        stamp,
      );
      return;
    }
    if (this.#chains.isForgotten(record)) this.#chains.loosen(record);
    if (this.#chains.table.runOf(record) === loose) {
      const set = this.#chains.latestOf(record);
      if (set === empty && add === undefined) return; // a place that nobody holds may be given away
      this.#chains.follow(record, set, before, low, high, stamp);
    } else if (this.#chains.contradicts(record, before, low, high)) {
      this.#counts.conflicts++;
      this.#chains.loosen(record);
    }
    if (add !== undefined) this.#chains.change(record, add);
    this.#chains.touch(record, stamp);
  }
}
