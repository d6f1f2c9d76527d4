/**
 * Keeps the index within its bytes. What has to go is marked in one pass over the runs; its records are given back by a sweep
 * that looks at a few records with every block that comes, so that no turn pays for all of them. The sweep also sees which
 * sets are in use, and forgets the others each time it has been round, a few at a time, too.
 */
import { type Chains, loose, segmentBytes } from './chains.ts';
import { none } from './hash-table.ts';
import { empty } from './run.ts';

/** From this share of a bound on, room is made in time. */
const fullShare = 15 / 16;
/** From this share of what runs and sets may have on, sets that nobody has any more are looked for, and again when it is so much more. */
const collectShare = 1 / 2;
const growth = 1.25;
/** Of what is held, goes at once. */
const evictedShare = 1 / 16;
/** Runs whose age is looked at to find out how old the oldest ones are. */
const ageSample = 512;
/** Records looked at for each block that comes: twice what one in sixteen needs. */
const sweepStep = 32;
/** Where runs and sets have little room: a round must end before removals, each of which may cut a run, have filled the rest. */
const shortSweepStep = 128;
/** Of the work on sets, which is told in blocks. */
const looksPerWork = 4;
/** Of a set in one round, mostly. */
const looksPerSet = 16;

type Why = 'evicted' | 'room' | 'other';
interface Beginning {
  readonly why: Why;
  readonly rounds: number;
  readonly hand: number;
  readonly restBytes: number;
}

export class Space {
  readonly #chains: Chains;
  /** The sweep goes round and round over the records; the next one. */
  #hand = 0;
  /** Where it may rest, after so many times round the end: nothing is stale then. */
  #restAt = 0;
  #roundsLeft = 0;
  /** Runs and sets take so much: look which sets are still in use. */
  #collectAt: number;
  /** Times round the end. */
  #rounds = 0;
  /** How the round that goes on began: clears make the sweep go on and on, and room must be made nevertheless. */
  #began: Beginning = { why: 'other', rounds: 0, hand: 0, restBytes: 0 };
  /** Loose records that the sweep drops. */
  #looseToDrop = 0;
  /** Blocks that were left out for want of space. */
  droppedBlocks = 0;

  constructor(chains: Chains) {
    this.#chains = chains;
    this.#collectAt = chains.maxRestBytes * collectShare;
  }

  /** Another bound from now on. */
  resize(maxRestBytes: number): void {
    this.#chains.maxRestBytes = maxRestBytes;
    this.#collectAt = maxRestBytes * collectShare;
  }

  /** Some records may be stale: all are to be seen again. */
  sweepAll(): void {
    if (!this.#isDue) this.#begin('other');
    this.#restAt = this.#hand;
    this.#roundsLeft = 1;
  }

  get #isDue(): boolean {
    return this.#roundsLeft > 0 || this.#hand < this.#restAt;
  }

  #begin(why: Why): void {
    this.#began = { why, rounds: this.#rounds, hand: this.#hand, restBytes: this.#chains.restBytes };
  }

  /** All records were seen since the round began. */
  get #isOver(): boolean {
    const rounds = this.#rounds - this.#began.rounds;
    return !this.#isDue || rounds > 1 || (rounds === 1 && this.#hand >= this.#began.hand);
  }

  /**
   * Looks at so many records more, or at fewer and at sets, and gives back those that nobody holds. Returns whether there is more to do.
   */
  sweep(records = 4096): boolean {
    const { sets, table } = this.#chains;
    for (let left = records; left > 0 && this.#isDue; left--) {
      const { work } = sets;
      if (this.#hand < table.used) this.#look(this.#hand++);
      else if (!sets.collect()) {
        this.#hand = 0;
        this.#roundsLeft--;
        this.#rounds++;
        this.#collectAt = Math.max(this.#chains.maxRestBytes * collectShare, this.#chains.restBytes * growth);
      }
      left -= looksPerWork * (sets.work - work);
    }
    return this.#isDue;
  }

  /** So many blocks have come. */
  came(blocks: number): void {
    this.#tend(blocks, this.#isOver && this.#isFull);
  }

  /** So many blocks have other holders than before: sets are more. */
  changed(blocks: number): void {
    this.#tend(blocks, false);
  }

  #tend(blocks: number, isFull: boolean): void {
    const isShort = this.#isShort;
    if (isFull || (isShort && this.#mustEvict)) this.#evict();
    else if (this.#isOver && (isShort || this.#chains.restBytes > this.#collectAt)) {
      this.sweepAll();
      this.#begin(isShort ? 'room' : 'other');
    } else if (this.#isDue) {
      if (this.#isOver) this.#begin('other');
      this.sweep(blocks * (isShort ? shortSweepStep : sweepStep));
    }
    this.#keepRest();
  }

  /**
   * Where runs and sets have little room. Removals leave sets that nobody has: rounds for these come first, while they help and there is time
   * for them.
   */
  get #mustEvict(): boolean {
    const { why, restBytes } = this.#began;
    if (!this.#isOver) return why !== 'evicted' && !this.#hasTime(1);
    return (why === 'room' && this.#chains.restBytes >= restBytes) || !this.#hasTime(2);
  }

  /** So many rounds end before removals, each of which may cut a run twice, have filled the rest. */
  #hasTime(rounds: number): boolean {
    const { restBytes, maxRestBytes, sets, table } = this.#chains;
    const removals = (maxRestBytes - restBytes) / (2 * segmentBytes);
    return removals * shortSweepStep > rounds * (table.used + looksPerSet * sets.count);
  }

  /** For one record more. */
  makeRoom(): void {
    const { table } = this.#chains;
    while (table.count >= table.maxRecords) if (!this.sweep(1024)) this.#evict();
  }

  /** At once, over all records if need be: where a bound is so small that a few segments fill what `Chains.hasRoom` leaves. */
  #keepRest(): void {
    while (this.#chains.restBytes > this.#chains.maxRestBytes && this.#chains.table.count > 0)
      if (!this.sweep()) this.#evict();
  }

  get #isFull(): boolean {
    const { table } = this.#chains;
    return table.count > table.maxRecords * fullShare || this.#isShort;
  }

  get #isShort(): boolean {
    return this.#chains.restBytes > this.#chains.maxRestBytes * fullShare;
  }

  /** What nobody holds goes; the sets of the others are in use. */
  #look(record: number): void {
    const chains = this.#chains;
    const number = chains.table.runOf(record);
    if (number === none) return;
    const set = chains.setOf(record);
    const surplus = number === loose && this.#looseToDrop > 0;
    if (surplus) {
      this.#looseToDrop--;
      this.droppedBlocks++;
    }
    if (surplus || set === empty) {
      chains.drop(record);
      return;
    }
    if (number === loose) chains.table.move(record, loose, set);
    else {
      const run = chains.runs[number]!;
      run.rename(run.segmentAt(chains.table.placeOf(record)), set);
    }
    chains.sets.see(set);
  }

  /** The runs that were not used for the longest time are forgotten; of loose blocks, as many as their share. */
  #evict(): void {
    const { runs, table } = this.#chains;
    const until = this.#oldest();
    let ordered = 0;
    for (const run of runs) {
      if (run === undefined) continue;
      ordered += run.records;
      if (run.end === 0 || run.stamp > until) continue;
      this.droppedBlocks += run.records;
      this.#chains.forget(run);
    }
    this.#looseToDrop = Math.ceil((table.count - ordered) * evictedShare);
    this.sweepAll();
    this.#begin('evicted');
  }

  /** The stamp that about `evictedShare` of the runs were last used at, or before. */
  #oldest(): number {
    const { runs } = this.#chains;
    const stamps: number[] = [];
    const step = Math.max(1, Math.floor(runs.length / ageSample));
    for (let i = runs.length - 1; i > 0; i -= step) {
      const run = runs[i];
      if (run !== undefined && run.end > 0) stamps.push(run.stamp);
    }
    stamps.sort((a, b) => a - b);
    return stamps[Math.floor(stamps.length * evictedShare)] ?? Number.POSITIVE_INFINITY;
  }
}
