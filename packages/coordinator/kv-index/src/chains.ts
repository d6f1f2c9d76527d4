/**
 * Records, runs and sets together: the blocks of all chains, and who holds each. Every change of the index is made of the steps
 * here; each of them keeps the invariants:
 *
 *   - an ordered record (run, place) is the only one of its place; a loose record has its set in the place's stead
 *   - a segment whose set is `empty` has no records; one whose set became empty (a source has gone) may have some
 *   - a place at or beyond its run's end is forgotten: the record waits for the sweep
 */
import { invariant } from '@kvtier/errors';
import { foldsOf, stepOf } from './folds.ts';
import { HashTable, none } from './hash-table.ts';
import type { Keys } from './keys.ts';
import { empty, Run } from './run.ts';
import { SourceSets } from './source-sets.ts';

/** What so many blocks that have this set have from now on. */
export type ChangeOfSet = (set: number, blocks: number) => number;

/** The run of a record that has none. */
export const loose = 0;
const runBytes = 200;
export const segmentBytes = 16;
/** Of what runs and sets may have; the rest is for what cannot wait: segments, the first set of a source. */
const filledShare = 31 / 32;

export class Chains {
  readonly table: HashTable;
  readonly sets: SourceSets;
  readonly runs: (Run | undefined)[] = [undefined];
  readonly #freeRuns: number[] = [];
  #runCount = 0;
  #segmentCount = 0;

  /** Runs and sets may have so many bytes. */
  maxRestBytes: number;

  constructor(maxRecords: number, maxRestBytes: number, maxSources: number, countedMedia: number) {
    this.table = new HashTable(maxRecords);
    this.maxRestBytes = maxRestBytes;
    this.sets = new SourceSets(maxSources, countedMedia);
  }

  get runCount(): number {
    return this.#runCount;
  }

  /** Memory of what is not records. */
  get restBytes(): number {
    return this.#runCount * runBytes + this.#segmentCount * segmentBytes + this.sets.bytes;
  }

  /**
   * There is room for a run or a set more. Without, blocks stay loose and have no holder more, until the sweep has made room: to make it
   * at once, a turn would have to look at all records.
   */
  get hasRoom(): boolean {
    return this.restBytes <= this.maxRestBytes * filledShare;
  }

  /** A loose record becomes the next block after `before`, or the first one of a run of its own, where there is room. */
  follow(record: number, set: number, before: number, low: number, high: number, stamp: number): void {
    const number = before === none ? loose : this.table.runOf(before);
    let run = number === loose ? undefined : this.runs[number]!;
    let runNumber = number;
    if (run === undefined || run.closed || run.end !== this.table.placeOf(before) + 1) {
      if (!this.hasRoom) {
        this.table.move(record, loose, set);
        return;
      }
      run = new Run(low, high, stamp);
      runNumber = this.#freeRuns.pop() ?? this.runs.length;
      this.runs[runNumber] = run;
      this.#runCount++;
    }
    const segments = run.segments;
    const place = run.append(set);
    this.#segmentCount += run.segments - segments;
    run.records++;
    run.stamp = stamp;
    this.table.move(record, runNumber, place);
    const { table } = this;
    const step = place === 0 ? 0 : stepOf(low, table.highOf(record));
    table.setFold(record, place === 0 ? 0 : (table.foldOf(before) + step) | 0);
  }

  /** A record that the sweep has not met yet: its run says nothing of it any more. */
  isForgotten(record: number): boolean {
    const run = this.table.runOf(record);
    return run !== loose && this.table.placeOf(record) >= this.runs[run]!.end;
  }

  /** Whether an ordered block is said to follow another block than before. */
  contradicts(record: number, before: number, low: number, high: number): boolean {
    const run = this.runs[this.table.runOf(record)]!;
    const place = this.table.placeOf(record);
    if (place === 0) return run.parentLow !== low || run.parentHigh !== high;
    if (before === none) return false;
    if (this.table.runOf(before) === this.table.runOf(record) && this.table.placeOf(before) === place - 1) return false;
    // Its place in the run is a hole: it went, and came back with a record of its own.
    return !this.sets.isEmpty(run.setOf(run.segmentAt(place - 1)));
  }

  /** Takes a block out of its run: nothing is said of its order any more. */
  loosen(record: number): void {
    const runNumber = this.table.runOf(record);
    const run = this.runs[runNumber]!;
    const place = this.table.placeOf(record);
    const set = this.latestOf(record);
    if (place < run.end) this.empty(run, place);
    this.table.move(record, loose, set);
    this.release(run, runNumber);
  }

  /** A place of a run is a hole now. */
  empty(run: Run, place: number): void {
    this.update(run, place, place + 1, () => empty);
    const segments = run.segments;
    run.shrink((set) => this.sets.isEmpty(set));
    this.#segmentCount += run.segments - segments;
  }

  /** Changes who holds one block. */
  change(record: number, change: ChangeOfSet): void {
    const runNumber = this.table.runOf(record);
    const place = this.table.placeOf(record);
    if (runNumber === loose) {
      this.table.move(record, loose, change(place, 1));
      return;
    }
    if (this.isForgotten(record)) {
      this.loosen(record);
      this.table.move(record, loose, change(empty, 1));
    } else this.update(this.runs[runNumber]!, place, place + 1, change);
  }

  update(run: Run, from: number, to: number, change: ChangeOfSet): void {
    const segments = run.segments;
    run.update(from, to, change);
    this.#segmentCount += run.segments - segments;
  }

  touch(record: number, stamp: number): void {
    const run = this.table.runOf(record);
    if (run !== loose) this.runs[run]!.stamp = stamp;
  }

  /** The set of a record, resolved; empty where its run says nothing of it any more. */
  setOf(record: number): number {
    return this.sets.resolve(this.latestOf(record));
  }

  /** The same, but not settled: `SourceSets.latest`. */
  latestOf(record: number): number {
    const runNumber = this.table.runOf(record);
    const place = this.table.placeOf(record);
    if (runNumber === loose) return this.sets.latest(place);
    const run = this.runs[runNumber]!;
    return place < run.end ? this.sets.latest(run.setOf(run.segmentAt(place))) : empty;
  }

  /** The record of a block that nobody holds, or that is left out, goes. */
  drop(record: number): void {
    const runNumber = this.table.runOf(record);
    const place = this.table.placeOf(record);
    this.table.delete(record);
    if (runNumber === loose) return;
    const run = this.runs[runNumber]!;
    if (place < run.end) this.empty(run, place);
    this.release(run, runNumber);
  }

  /** One record less names this run. */
  release(run: Run, runNumber: number): void {
    if (--run.records > 0) return;
    this.#segmentCount -= run.segments;
    this.runs[runNumber] = undefined;
    this.#freeRuns.push(runNumber);
    this.#runCount--;
  }

  /** How many hashes from `at` on are listed as what follows `before` in its run. */
  stretch(keys: Keys, at: number, before: number): number {
    const run = this.table.runOf(before);
    if (run === loose) return 0;
    const first = this.table.placeOf(before) + 1;
    const end = this.runs[run]!.end;
    let count = 0;
    for (; at + 2 * count < keys.length && first + count < end; count++) {
      const record = this.table.find(keys[at + 2 * count]!, keys[at + 2 * count + 1]!);
      if (record === none || this.table.runOf(record) !== run || this.table.placeOf(record) !== first + count) break;
    }
    return count;
  }

  /**
   * The record of a prompt's last block. A match needs it, that of the first block and mostly those of the two where the last one's run begins:
   * what they lie in is fetched here, so that they are not waited for one after the other.
   */
  lastOf(keys: Keys): number {
    const { table } = this;
    const count = keys.length >>> 1;
    table.fetch(keys, 0, count - 1);
    const last = table.find(keys[2 * count - 2]!, keys[2 * count - 1]!);
    if (last === none || table.runOf(last) === loose) return last;
    const begins = count - 1 - table.placeOf(last);
    if (begins > 0 && begins < count) table.fetch(keys, begins - 1, begins);
    return last;
  }

  /**
   * How many blocks from `place` of a run on are the prompt's from `position` on, at most `most`; the first one, `begin`, is. `last` is the record
   * of the prompt's last block.
   */
  extent(keys: Keys, position: number, begin: number, run: number, place: number, most: number, last: number): number {
    const { table } = this;
    const folds = foldsOf(keys);
    const before = table.foldOf(begin) - folds[position]!;
    const lastAt = (keys.length >>> 1) - 1;
    // With all that lie between: whoever says that a block comes after another may lie.
    const isHere = (offset: number): boolean => {
      const block = position + offset;
      const record = block === lastAt ? last : table.find(keys[2 * block]!, keys[2 * block + 1]!);
      if (record === none || table.runOf(record) !== run || table.placeOf(record) !== place + offset) return false;
      return ((table.foldOf(record) - folds[block]! - before) | 0) === 0;
    };
    if (isHere(most - 1)) return most;
    // Mostly the last block lies in the run that begins where this one is left.
    const end = position + most - 1;
    const left = most - 1 - this.#placeOf(end === lastAt ? last : table.find(keys[2 * end]!, keys[2 * end + 1]!));
    if (left >= 1 && left < most && isHere(left - 1) && !isHere(left)) return left;
    let low = 1;
    let high = most - 1;
    while (low < high) {
      const middle = (low + high + 1) >>> 1;
      if (isHere(middle - 1)) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** Its place in its run, whichever that is; none: no run has it. */
  #placeOf(record: number): number {
    return record === none || this.table.runOf(record) === loose ? none : this.table.placeOf(record);
  }

  /** All that a run says is forgotten; its records wait for the sweep. */
  forget(run: Run): void {
    this.#segmentCount -= run.segments;
    run.forget();
  }

  /** Throws InvariantError unless records, runs and sums agree. O(records). */
  checkIntegrity(): void {
    const records = new Map<Run, number>();
    for (let record = 0; record < this.table.used; record++) {
      const number = this.table.runOf(record);
      if (number === none) continue;
      invariant(this.sets.exists(this.setOf(record)), 'KV index: a block has a set that is none');
      if (number === loose) continue;
      const run = this.runs[number];
      invariant(run, 'KV index: a record names a run that is none');
      records.set(run, (records.get(run) ?? 0) + 1);
    }
    let segments = 0;
    for (const run of this.runs) {
      if (run === undefined) continue;
      segments += run.segments;
      invariant(run.records === records.get(run), 'KV index: a run miscounts its records');
    }
    invariant(records.size === this.#runCount, 'KV index: runs are miscounted');
    invariant(segments === this.#segmentCount, 'KV index: segments are miscounted');
  }
}
