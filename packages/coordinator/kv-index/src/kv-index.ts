/**
 * The index of a cluster: which worker holds which block, on which medium, for routers. Fed by block events; asked for the
 * length of the prefix that each target can use.
 *
 * A chain hash names its block and all blocks before it. So blocks that were announced one after another form a run
 * (`run.ts`), and when the hash at some place of a run is the prompt's, all before it are, too: a prompt of 6,000 blocks is
 * matched with two look-ups per run and a binary search where it leaves one, not with 6,000. Who holds a stretch is one
 * number (`source-sets.ts`), so that a copy on another worker costs no memory where whole stretches are shared.
 *
 *     hash ──▶ record (run, place) ──▶ run ──▶ segment ──▶ set ──▶ media of each source
 *
 * Order is believed only while nobody contradicts it: a block that is announced after two different parents becomes loose (a
 * record without a run) and is looked up by itself. Announcements without an order (tiers know hashes only) are loose, too, until
 * a prompt or an event tells their order (`learn`).
 *
 * Bounded: `maxBytes` of memory. When it is reached, the runs that were not used for the longest time go; the index may
 * then lack blocks, but names none that its holder has dropped. It is a hint: whoever imports a block verifies it.
 * (After SGLang's radix tree and Dynamo's positional index; sets by hash consing are our own.)
 */
import { invariant, KvError } from '@kvtier/errors';
import { HashTable, none } from './hash-table.ts';
import { empty, Run } from './run.ts';
import { maxMedia, SourceSets } from './source-sets.ts';

/** Block hashes, two words each: low, high half of the 64-bit form. */
export type Keys = Int32Array;
/** The hash before the first one of an event; 'root': there is none; 'unknown': hashes without an order. */
export type Parent = Keys | 'root' | 'unknown';

/** What can serve one request: the sources whose blocks are at hand there (an engine, its cache node, what is shared). */
export interface Target {
  readonly sources: readonly number[];
}

export interface Match {
  /** Leading blocks that are all at hand. */
  readonly blocks: number;
  /** Of these, how many lie on each medium, counted on the lowest-numbered one that holds the block. */
  readonly byMedium: Int32Array;
}

export interface KvIndexOptions {
  readonly maxBytes: number;
  /** Publishers that can be told apart at a time. */
  readonly maxSources?: number;
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

const loose = 0;
/** A record with its place in a table that is at least 53 % full. */
const recordBytes = 24;
/** Of `maxBytes`, for records; the rest is for runs and sets. */
const recordShare = 0.75;
/** From this share of a bound on, room is made in time, a little with every block that comes. */
const fullShare = 15 / 16;
const runBytes = 200;
const segmentBytes = 16;
/** Of what is held, goes at once when there is no room. */
const evictedShare = 1 / 16;
const stampSample = 512;
/** Records looked at for each block that is stored, while there is something to sweep: twice what one in sixteen needs. */
const sweepStep = 32;
/** Empty tables, and the part of a chunk of records that is not in use yet. */
const fixedBytes = 128 * 1024;
const minBytes = 4 * fixedBytes;

export class KvIndex {
  readonly #maxBytes: number;
  readonly #table: HashTable;
  readonly #sets: SourceSets;
  readonly #runs: (Run | undefined)[] = [undefined];
  readonly #freeRuns: number[] = [];
  readonly #sources: boolean[] = [];
  readonly #maxSources: number;
  readonly #counts = { droppedBlocks: 0, unknownRemovals: 0, conflicts: 0 };
  #runCount = 0;
  #segmentCount = 0;
  #clock = 0;
  /** Where the sweep goes on; and how many records it has to see until nothing is stale. */
  #hand = 0;
  #toSweep = 0;
  /** Records that the sweep has still to see until it has seen all sets that are in use. */
  #untilPass = 0;
  /** Loose records that the sweep drops for want of space. */
  #looseToDrop = 0;

  /** @throws KvError CONFIG when the bound is too small for anything */
  constructor({ maxBytes, maxSources = 256 }: KvIndexOptions) {
    if (!(maxBytes >= minBytes))
      throw new KvError('CONFIG', `KV index: ${maxBytes} bytes are too few; ask for ${minBytes} or more`);
    this.#maxBytes = maxBytes;
    this.#maxSources = maxSources;
    this.#sets = new SourceSets(maxSources);
    this.#table = new HashTable(Math.floor((maxBytes * recordShare - fixedBytes) / recordBytes));
  }

  /** A number for a publisher. @throws KvError FULL when there are too many */
  addSource(): number {
    for (let source = 0; source < this.#maxSources; source++) {
      if (this.#sources[source]) continue;
      this.#sources[source] = true;
      return source;
    }
    throw new KvError('CONFIG', `KV index: more than ${this.#maxSources} publishers; raise maxSources`);
  }

  /** The publisher is gone: nothing of it counts from now on, and its number may be given away again. O(sets). */
  removeSource(source: number): void {
    this.cleared(source);
    this.#sources[source] = false;
  }

  /** All that this source holds, on one medium or on all, is gone. O(sets); records follow in later turns (`sweep`). */
  cleared(source: number, medium?: number): void {
    this.#sets.clear(source, medium);
    this.#toSweep = this.#table.used;
  }

  /** This source holds these blocks now, one copy more of each. */
  stored(source: number, medium: number, keys: Keys, parent: Parent): void {
    invariant(this.#sources[source] && medium < maxMedia, 'KV index: no such source or medium');
    const stamp = ++this.#clock;
    const add = (set: number): number => this.#sets.with(this.#live(set), source, medium);
    if (parent === 'unknown') this.#storeLoose(keys, add);
    else this.#storeChain(keys, parent, stamp, add);
    if (this.#toSweep > 0) this.sweep((keys.length / 2) * sweepStep);
    else if (this.#isNearlyFull(fullShare)) this.#evict();
    while (this.#restBytes > this.#maxBytes * (1 - recordShare) && this.#table.count > 0) {
      if (!this.sweep()) this.#evict();
    }
  }

  /** One copy less of each. */
  removed(source: number, medium: number, keys: Keys): void {
    const remove = (set: number): number => this.#sets.without(this.#live(set), source, medium);
    const holder = 1 << medium;
    for (let at = 0; at < keys.length; at += 2) {
      const record = this.#table.find(keys[at]!, keys[at + 1]!);
      const set = record === none ? empty : this.#setOfRecord(record);
      if ((this.#sets.bitsOf(set)[source]! & holder) === 0) {
        this.#counts.unknownRemovals++;
        continue;
      }
      this.#change(record, remove);
      if (this.#setOfRecord(record) === empty) this.#drop(record);
    }
  }

  /** A prompt's blocks in their order: what is known of them without an order gets one. */
  learn(keys: Keys): void {
    if (keys.length === 0) return;
    this.#storeChain(keys, 'root', ++this.#clock, undefined);
  }

  /** How much of the prompt each target has at hand, from the first block on. */
  match(keys: Keys, targets: readonly Target[]): Match[] {
    const stamp = ++this.#clock;
    const blocks = new Int32Array(targets.length);
    const byMedium = targets.map(() => new Int32Array(maxMedia));
    let alive = targets.map((_, i) => i);
    const count = keys.length / 2;
    /** `length` more blocks with these holders; how many targets go on. */
    const take = (length: number, bits: Uint8Array): number => {
      let kept = 0;
      for (const target of alive) {
        let media = 0;
        for (const source of targets[target]!.sources) media |= bits[source]!;
        if (media === 0) continue;
        blocks[target]! += length;
        byMedium[target]![31 - Math.clz32(media & -media)]! += length;
        alive[kept++] = target;
      }
      alive.length = kept;
      return kept;
    };
    let position = 0;
    scan: while (position < count && alive.length > 0) {
      const record = this.#table.find(keys[2 * position]!, keys[2 * position + 1]!);
      if (record === none) break;
      const runNumber = this.#table.runOf(record);
      if (runNumber === loose) {
        if (take(1, this.#sets.bitsOf(this.#live(this.#table.placeOf(record)))) === 0) break;
        position++;
        continue;
      }
      const run = this.#runs[runNumber]!;
      const place = this.#table.placeOf(record);
      if (place >= run.end) break;
      run.stamp = stamp;
      const length = this.#extent(keys, position, runNumber, place, Math.min(run.end - place, count - position));
      const last = place + length;
      let segment = run.segmentAt(place);
      for (let from = place; from < last; segment++) {
        const to = Math.min(run.endOf(segment), last);
        const set = this.#live(run.setOf(segment));
        if (set === empty) {
          // Nobody holds it as part of this run; it may have come back since, with a record of its own.
          if (from === place) break scan;
          position += from - place;
          continue scan;
        }
        if (take(to - from, this.#sets.bitsOf(set)) === 0) break scan;
        from = to;
      }
      position += length;
    }
    alive = [];
    return targets.map((_, i) => ({ blocks: blocks[i]!, byMedium: byMedium[i]! }));
  }

  /** Media of every source that holds this block, by source. For tests and for tools. */
  holdersOf(low: number, high: number): Uint8Array {
    const record = this.#table.find(low, high);
    return this.#sets.bitsOf(record === none ? empty : this.#setOfRecord(record)).slice();
  }

  /** Looks at so many records more, and gives back those that nobody holds. Returns whether there is more to do. */
  sweep(records = 4096): boolean {
    for (let left = Math.min(records, this.#toSweep); left > 0; left--) {
      this.#toSweep--;
      if (this.#hand >= this.#table.used) this.#hand = 0;
      this.#look(this.#hand++);
      if (--this.#untilPass > 0) continue;
      this.#sets.endPass();
      this.#untilPass = this.#table.used;
    }
    return this.#toSweep > 0;
  }

  /** Memory. */
  get bytes(): number {
    return this.#table.bytes + this.#restBytes;
  }

  stats(): KvIndexStats {
    return {
      blocks: this.#table.count,
      bytes: this.bytes,
      runs: this.#runCount,
      sets: this.#sets.count,
      ...this.#counts,
    };
  }

  /** Throws InvariantError unless records, runs and sums agree. O(records). */
  checkIntegrity(): void {
    const records = new Map<Run, number>();
    for (let record = 0; record < this.#table.used; record++) {
      const number = this.#table.runOf(record);
      if (number === none || number === loose) continue;
      const run = this.#runs[number];
      invariant(run, 'KV index: a record names a run that is none');
      records.set(run, (records.get(run) ?? 0) + 1);
    }
    let segments = 0;
    for (const run of this.#runs) {
      if (run === undefined) continue;
      segments += run.segments;
      invariant(run.records === records.get(run), 'KV index: a run miscounts its records');
    }
    invariant(records.size === this.#runCount, 'KV index: runs are miscounted');
    invariant(segments === this.#segmentCount, 'KV index: segments are miscounted');
  }

  #storeLoose(keys: Keys, add: (set: number) => number): void {
    for (let at = 0; at < keys.length; at += 2) {
      const record = this.#table.find(keys[at]!, keys[at + 1]!);
      if (record !== none) this.#change(record, add);
      else {
        this.#makeRoom();
        this.#table.insert(keys[at]!, keys[at + 1]!, loose, add(empty));
      }
    }
  }

  /** Without `add`, nothing is stored: only the order is told. */
  #storeChain(keys: Keys, parent: Keys | 'root', stamp: number, add: ((set: number) => number) | undefined): void {
    let low = parent === 'root' ? 0 : parent[0]!;
    let high = parent === 'root' ? 0 : parent[1]!;
    let before = parent === 'root' ? none : this.#table.find(low, high);
    for (let at = 0; at < keys.length; ) {
      const stretch = before === none ? 0 : this.#stretch(keys, at, before);
      if (stretch > 0) {
        const run = this.#runs[this.#table.runOf(before)]!;
        const place = this.#table.placeOf(before) + 1;
        if (add !== undefined) this.#update(run, place, place + stretch, add);
        run.stamp = stamp;
        at += 2 * stretch;
      } else {
        this.#storeOne(keys, at, before, low, high, stamp, add);
        at += 2;
      }
      low = keys[at - 2]!;
      high = keys[at - 1]!;
      before = this.#table.find(low, high);
    }
  }

  /** How many hashes from `at` on are listed as what follows `before` in its run. */
  #stretch(keys: Keys, at: number, before: number): number {
    const run = this.#table.runOf(before);
    if (run === loose) return 0;
    const first = this.#table.placeOf(before) + 1;
    const end = this.#runs[run]!.end;
    let count = 0;
    for (; at + 2 * count < keys.length && first + count < end; count++) {
      const record = this.#table.find(keys[at + 2 * count]!, keys[at + 2 * count + 1]!);
      if (record === none || this.#table.runOf(record) !== run || this.#table.placeOf(record) !== first + count) break;
    }
    return count;
  }

  #storeOne(
    keys: Keys,
    at: number,
    before: number,
    low: number,
    high: number,
    stamp: number,
    add: ((set: number) => number) | undefined,
  ): void {
    const record = this.#table.find(keys[at]!, keys[at + 1]!);
    if (record === none) {
      if (add === undefined) return;
      this.#makeRoom();
      const fresh = this.#table.insert(keys[at]!, keys[at + 1]!, loose, empty);
      // Making room may have taken the record of the block before.
      this.#follow(fresh, add(empty), before === none ? none : this.#table.find(low, high), low, high, stamp);
      return;
    }
    if (this.#isForgotten(record)) this.#loosen(record);
    if (this.#table.runOf(record) === loose) {
      this.#follow(record, this.#setOfRecord(record), before, low, high, stamp);
    } else if (this.#contradicts(record, before, low, high)) {
      this.#counts.conflicts++;
      this.#loosen(record);
    }
    if (add !== undefined) this.#change(record, add);
    this.#touch(record, stamp);
  }

  /** A loose record becomes the next block after `before`, or the first one of a run of its own. */
  #follow(record: number, set: number, before: number, low: number, high: number, stamp: number): void {
    const number = before === none ? loose : this.#table.runOf(before);
    let run = number === loose ? undefined : this.#runs[number]!;
    let runNumber = number;
    if (run === undefined || run.closed || run.end !== this.#table.placeOf(before) + 1) {
      run = new Run(low, high, stamp);
      runNumber = this.#freeRuns.pop() ?? this.#runs.length;
      this.#runs[runNumber] = run;
      this.#runCount++;
    }
    const segments = run.segments;
    const place = run.append(set);
    this.#segmentCount += run.segments - segments;
    run.records++;
    run.stamp = stamp;
    this.#table.move(record, runNumber, place);
  }

  /** A record that the sweep has not met yet: its run says nothing of it any more. */
  #isForgotten(record: number): boolean {
    const run = this.#table.runOf(record);
    return run !== loose && this.#table.placeOf(record) >= this.#runs[run]!.end;
  }

  /** Whether an ordered block is said to follow another block than before. */
  #contradicts(record: number, before: number, low: number, high: number): boolean {
    const run = this.#runs[this.#table.runOf(record)]!;
    const place = this.#table.placeOf(record);
    if (place === 0) return run.parentLow !== low || run.parentHigh !== high;
    if (before === none) return false;
    if (this.#table.runOf(before) === this.#table.runOf(record) && this.#table.placeOf(before) === place - 1)
      return false;
    // Its place in the run is a hole: it went, and came back with a record of its own.
    return this.#live(run.setOf(run.segmentAt(place - 1))) !== empty;
  }

  /** Takes a block out of its run: nothing is said of its order any more. */
  #loosen(record: number): void {
    const runNumber = this.#table.runOf(record);
    const run = this.#runs[runNumber]!;
    const place = this.#table.placeOf(record);
    const set = this.#setOfRecord(record);
    if (place < run.end) this.#empty(run, place);
    this.#table.move(record, loose, set);
    this.#release(run, runNumber);
  }

  /** A place of a run is a hole now. */
  #empty(run: Run, place: number): void {
    this.#update(run, place, place + 1, () => empty);
    const segments = run.segments;
    run.shrink((set) => this.#live(set) === empty);
    this.#segmentCount += run.segments - segments;
  }

  /** Changes who holds one block. */
  #change(record: number, change: (set: number) => number): void {
    const runNumber = this.#table.runOf(record);
    const place = this.#table.placeOf(record);
    if (runNumber === loose) {
      this.#table.move(record, loose, change(place));
      return;
    }
    if (this.#isForgotten(record)) {
      this.#loosen(record);
      this.#table.move(record, loose, change(empty));
    } else this.#update(this.#runs[runNumber]!, place, place + 1, change);
  }

  #update(run: Run, from: number, to: number, change: (set: number) => number): void {
    const segments = run.segments;
    run.update(from, to, change);
    this.#segmentCount += run.segments - segments;
  }

  #touch(record: number, stamp: number): void {
    const run = this.#table.runOf(record);
    if (run !== loose) this.#runs[run]!.stamp = stamp;
  }

  /** The set of a record, resolved; empty where its run says nothing of it any more. */
  #setOfRecord(record: number): number {
    const runNumber = this.#table.runOf(record);
    const place = this.#table.placeOf(record);
    if (runNumber === loose) return this.#live(place);
    const run = this.#runs[runNumber]!;
    return place < run.end ? this.#live(run.setOf(run.segmentAt(place))) : empty;
  }

  #live(set: number): number {
    return this.#sets.resolve(set);
  }

  /** The record of a block that nobody holds, or that is left out, goes. */
  #drop(record: number): void {
    const runNumber = this.#table.runOf(record);
    const place = this.#table.placeOf(record);
    this.#table.delete(record);
    if (runNumber === loose) {
      if (this.#looseToDrop > 0) this.#looseToDrop--;
      return;
    }
    const run = this.#runs[runNumber]!;
    if (place < run.end) this.#empty(run, place);
    this.#release(run, runNumber);
  }

  /** One record less names this run. */
  #release(run: Run, runNumber: number): void {
    if (--run.records > 0) return;
    this.#segmentCount -= run.segments;
    this.#runs[runNumber] = undefined;
    this.#freeRuns.push(runNumber);
    this.#runCount--;
  }

  /** How many blocks from `place` on are the prompt's from `position` on, at most `most`; the first one is. */
  #extent(keys: Keys, position: number, run: number, place: number, most: number): number {
    const isHere = (offset: number): boolean => {
      const at = 2 * (position + offset);
      const record = this.#table.find(keys[at]!, keys[at + 1]!);
      return record !== none && this.#table.runOf(record) === run && this.#table.placeOf(record) === place + offset;
    };
    if (isHere(most - 1)) return most;
    let low = 1;
    let high = most - 1;
    while (low < high) {
      const middle = (low + high + 1) >>> 1;
      if (isHere(middle - 1)) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** Of what is not records. */
  get #restBytes(): number {
    return this.#runCount * runBytes + this.#segmentCount * segmentBytes + this.#sets.bytes;
  }

  #isNearlyFull(share: number): boolean {
    return (
      this.#table.count > this.#table.maxRecords * share || this.#restBytes > this.#maxBytes * (1 - recordShare) * share
    );
  }

  /** For one record more. */
  #makeRoom(): void {
    while (this.#table.count >= this.#table.maxRecords) if (!this.sweep(1024)) this.#evict();
  }

  /** One record of the sweep: what nobody holds goes; the sets of the others are in use. */
  #look(record: number): void {
    const runNumber = this.#table.runOf(record);
    if (runNumber === none) return;
    const place = this.#table.placeOf(record);
    if (runNumber === loose) {
      const set = this.#live(place);
      if (this.#looseToDrop > 0) this.#counts.droppedBlocks++;
      if (set === empty || this.#looseToDrop > 0) return this.#drop(record);
      this.#table.move(record, loose, set);
      this.#sets.see(set);
      return;
    }
    const run = this.#runs[runNumber]!;
    if (place >= run.end) return this.#drop(record);
    const segment = run.segmentAt(place);
    const set = this.#live(run.setOf(segment));
    if (set === empty) return this.#drop(record);
    run.rename(segment, set);
    this.#sets.see(set);
  }

  /** The runs that were not used for the longest time are forgotten; of loose blocks, as many as their share. */
  #evict(): void {
    const stamps: number[] = [];
    const step = Math.max(1, Math.floor(this.#runs.length / stampSample));
    for (let i = 1 + (this.#clock % step); i < this.#runs.length; i += step) {
      const run = this.#runs[i];
      if (run !== undefined && run.end > 0) stamps.push(run.stamp);
    }
    stamps.sort((a, b) => a - b);
    const until = stamps[Math.floor(stamps.length * evictedShare)] ?? Number.POSITIVE_INFINITY;
    let ordered = 0;
    for (const run of this.#runs) {
      if (run === undefined) continue;
      ordered += run.records;
      if (run.end === 0 || run.stamp > until) continue;
      this.#counts.droppedBlocks += run.records;
      this.#segmentCount -= run.segments;
      run.forget();
    }
    this.#looseToDrop = Math.ceil((this.#table.count - ordered) * evictedShare);
    this.#toSweep = this.#table.used;
    this.#untilPass = Math.max(this.#untilPass, 1);
  }
}
