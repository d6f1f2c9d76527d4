/**
 * Who holds a block, as a number. The blocks of a cluster are many, the sets of their holders few: chains are held by the same
 * engines and nodes from end to end. So every set exists once and is named by a small integer (hash consing: Ershov 1958),
 * and "this source holds it on that medium, too" is a step from one number to another, remembered after the first time.
 *
 *     set 17:  bits[source] = media of that source, a bit each    copies: (source, medium) → count, where it is above 1
 *
 * A source that goes is not looked for: it is noted (`clears.ts`), and left out wherever a set is read or a step is taken from it. A set is
 * settled, so that it is another name of what is left, by whoever has the time for it (`resolve`): decisions have none. What nobody names
 * any more is collected a set at a time. So nothing here takes all sets at once. Set 0 is empty.
 */
import { invariant } from '@kvtier/errors';
import { Clears, maxMedia } from './clears.ts';
import { SetRows } from './set-rows.ts';

/** At most this many sources: a set may take twice as many bytes. */
export const mostSources = 4_096;
/** The narrowest row. */
const minWidth = 64;
/** Copies of one block in one place that are told apart; an engine's pool without de-duplication has two or three. */
const maxCopies = 255;
/** What a set costs beside its bits: map of copies, map entry, name. */
const setOverheadBytes = 400;

/** To make, move or drop a set takes as long as to store so many blocks. */
const workOfSet = 1;
/** To make it, one more for so many bytes of its row, and so much for each of its copies: that is what its name is made of. */
const bytesPerWork = 1_024;
const workPerCopy = 1 / 8;

/** (source × maxMedia + medium) → copies, where there are several. */
type Copies = ReadonlyMap<number, number>;

/** Most sets have none: one for all, as every object is one more to be marked while decisions are made. */
const singles: Copies = new Map();

export class SourceSets {
  readonly #maxSources: number;
  /** Media, a bit each, on which a source may hold a block several times. */
  readonly #countedMedia: number;
  /** Media of each source. */
  readonly #rows: SetRows;
  readonly #copies: (Copies | undefined)[] = [];
  /** For the set that is looked for: as many sources as were ever told apart. */
  #scratch: Uint8Array;
  /** Width of the row → name → set. */
  readonly #byName = new Map<number, Map<string, number>>();
  readonly #names: (string | undefined)[] = [];
  /** Where a set that named a source that has gone leads to; itself otherwise. */
  readonly #leadsTo: number[] = [];
  readonly #clears = new Clears();
  /** Of each set: what was cleared until then is out of it. */
  readonly #settled: number[] = [];
  readonly #free: number[] = [];
  /** The pass in which each set was last seen in use. */
  readonly #seen: number[] = [];
  #pass = 0;
  /** The number that is collected next. */
  #hand = 1;
  /** (set, holder) → set with one copy more; and one less. */
  readonly #more = new Map<number, number>();
  readonly #less = new Map<number, number>();
  #live = 0;
  /** What sets have cost so far, in blocks stored that have none of their own. */
  work = 0;

  constructor(maxSources: number, countedMedia: number) {
    invariant(maxSources > 0 && maxSources <= mostSources, `source sets: 1 to ${mostSources} sources`);
    this.#maxSources = maxSources;
    this.#countedMedia = countedMedia;
    this.#rows = new SetRows(minWidth, maxSources);
    this.#scratch = new Uint8Array(this.#rows.widthFor(0));
    this.#clears.admit(this.#scratch.length);
    this.#intern(singles, 0);
  }

  /** Sets that exist. */
  get count(): number {
    return this.#live;
  }

  /** Memory of sets and of the steps between them. */
  get bytes(): number {
    const { bytes, rowBytes } = this.#rows;
    return bytes + rowBytes + this.#live * setOverheadBytes + (this.#more.size + this.#less.size) * 40;
  }

  /** There is room for this source from now on. Sets are as they were: a row becomes wide with the source that needs it. */
  admit(source: number): void {
    invariant(source < this.#maxSources, `source sets: at most ${this.#maxSources} sources`);
    if (source < this.#scratch.length) return;
    this.#scratch = new Uint8Array(this.#rows.widthFor(source + 1));
    this.#clears.admit(this.#scratch.length);
    this.#forgetSteps();
  }

  /** The set that this number stands for now. */
  resolve(set: number): number {
    const latest = this.latest(set);
    return this.isStale(latest) ? this.#settle(latest) : latest;
  }

  /** The set that it stood for when anybody settled it last: what was cleared since may still be in its row. Costs next to nothing. */
  latest(set: number): number {
    let at = set;
    while (this.#leadsTo[at] !== at) at = this.#leadsTo[at]!;
    if (at !== set) this.#leadsTo[set] = at; // not step by step again: a thousand sources may go at once
    return at;
  }

  /** Its row may name what was cleared: `left` says. `set` is a latest one. */
  isStale(set: number): boolean {
    return this.#settled[set] !== this.#clears.count;
  }

  /** Of these media of a source, as its row has them, those that it still holds. */
  left(set: number, source: number, media: number): number {
    return this.#clears.left(source, media, this.#settled[set]!);
  }

  exists(set: number): boolean {
    return this.#copies[this.resolve(set)] !== undefined;
  }

  /** Sources from this number on hold nothing. */
  widthOf(set: number): number {
    return this.#rows.widthOf(set);
  }

  /** Where the media of each source below `widthOf` lie, by its number, from `firstOf` on. Not to be changed; `set` is a latest one. */
  slabOf(set: number): Uint8Array {
    return this.#rows.slabOf(set);
  }

  firstOf(set: number): number {
    return this.#rows.firstOf(set);
  }

  /** Media of one source. `set` is a latest one. */
  mediaOf(set: number, source: number): number {
    const media = source < this.widthOf(set) ? this.slabOf(set)[this.firstOf(set) + source]! : 0;
    return media !== 0 && this.isStale(set) ? this.left(set, source, media) : media;
  }

  /** What `left` says of all sources below `widthOf`. To be read at once: there is one such row. `set` is a latest one. */
  rowLeft(set: number): Uint8Array {
    const row = this.#scratch;
    row.set(this.bitsOf(set));
    this.#clears.takeOut(row, this.#settled[set]!);
    return row;
  }

  /** Nobody holds it. */
  isEmpty(set: number): boolean {
    const latest = this.latest(set);
    const bits = this.bitsOf(latest);
    let source = 0;
    while (source < bits.length && (bits[source] === 0 || this.left(latest, source, bits[source]!) === 0)) source++;
    this.work += source / bytesPerWork;
    return source === bits.length;
  }

  /** Media of each source below `widthOf`, by its number. Not to be changed; `set` is resolved. */
  bitsOf(set: number): Uint8Array {
    return this.#rows.of(set);
  }

  /** One copy more; undefined: that would be a set more, and it may not be made. */
  with(set: number, source: number, medium: number, mayGrow: () => boolean): number | undefined {
    return this.#step(this.#more, set, source, medium, 1, mayGrow);
  }

  /** One copy less; the set itself when there was none. Undefined as above. */
  without(set: number, source: number, medium: number, mayGrow: () => boolean): number | undefined {
    return this.#step(this.#less, set, source, medium, -1, mayGrow);
  }

  /** This source holds nothing any more. Of one medium, where it is given. */
  clear(source: number, medium?: number): void {
    this.#clears.add(source, medium);
    this.#forgetSteps();
  }

  /** This number is in use; so is what it leads to. */
  see(set: number): void {
    this.#seen[set] = this.#pass;
  }

  /**
   * The next number has its turn: a set that was not seen since the last one is forgotten. The caller has seen every number that it holds;
   * what is made meanwhile counts as seen. False: all have had theirs, and it begins anew.
   */
  collect(): boolean {
    if (this.#hand === 1) this.#forgetSteps(); // those taken from now on lead to what stays
    if (this.#hand < this.#copies.length) {
      this.#review(this.#hand++);
      return true;
    }
    if (this.#rows.pack()) {
      this.work += workOfSet;
      return true;
    }
    this.#hand = 1;
    this.#pass++;
    return false;
  }

  #review(id: number): void {
    if (this.#copies[id] === undefined || this.#seen[id] === this.#pass) return;
    if (this.#leadsTo[id] === id) this.#dissolve(id);
    this.#copies[id] = undefined;
    this.#leadsTo[id] = id;
    this.#free.push(id);
  }

  /** Without what was cleared since it was settled last. */
  #settle(id: number): number {
    if (this.#isSettled(id)) return id;
    const width = this.widthOf(id);
    const copies = this.#load(id);
    this.#dissolve(id);
    const to = this.#intern(copies, width);
    this.#leadsTo[id] = to;
    return to;
  }

  /** Nothing of it was cleared. */
  #isSettled(id: number): boolean {
    if (!this.isStale(id)) return true;
    const bits = this.bitsOf(id);
    const since = this.#settled[id]!;
    this.work += this.#clears.looksOf(bits, since) / bytesPerWork;
    if (this.#clears.touches(bits, since)) return false;
    this.#settled[id] = this.#clears.count;
    return true;
  }

  /** It has neither row nor name any more. */
  #dissolve(id: number): void {
    const byName = this.#byNameOf(this.widthOf(id));
    const name = this.#names[id]!;
    if (byName.get(name) === id) byName.delete(name);
    this.#names[id] = undefined;
    this.work += workOfSet;
    this.#rows.remove(id);
    this.#live--;
  }

  #forgetSteps(): void {
    this.#more.clear();
    this.#less.clear();
  }

  #step(
    steps: Map<number, number>,
    number: number,
    source: number,
    medium: number,
    by: 1 | -1,
    mayGrow: () => boolean,
  ): number | undefined {
    const set = this.latest(number);
    const holder = source * maxMedia + medium;
    const step = set * (this.#scratch.length * maxMedia) + holder;
    const known = steps.get(step);
    if (known !== undefined) {
      this.#seen[known] = this.#pass;
      return known;
    }
    const media = this.mediaOf(set, source);
    const count = ((media >>> medium) & 1) === 0 ? 0 : (this.#copies[set]!.get(holder) ?? 1);
    const most = ((this.#countedMedia >>> medium) & 1) === 1 ? maxCopies : 1;
    const next = Math.min(Math.max(count + by, 0), most);
    let to: number | undefined = set;
    if (next !== count) {
      const copies = copiesWith(this.#load(set), holder, next);
      this.#scratch[source] = next === 0 ? media & ~(1 << medium) : media | (1 << medium);
      to = this.#intern(copies, Math.max(this.widthOf(set), source + 1), mayGrow);
    }
    if (to !== undefined && mayGrow()) steps.set(step, to);
    return to;
  }

  /** Who holds it now, in `#scratch`; returns the copies. */
  #load(set: number): Copies {
    const scratch = this.#scratch;
    scratch.set(this.bitsOf(set));
    scratch.fill(0, this.widthOf(set));
    let copies = this.#copies[set]!;
    if (this.#isSettled(set)) return copies;
    const since = this.#settled[set]!;
    this.#clears.takeOut(scratch, since);
    for (const holder of copies.keys()) if (this.#clears.isOut(holder, since)) copies = copiesWith(copies, holder, 0);
    return copies;
  }

  /** The set of the bits in `#scratch`, which has none from `end` on. */
  #intern(copies: Copies, end: number): number;
  #intern(copies: Copies, end: number, mayGrow: () => boolean): number | undefined;
  #intern(copies: Copies, end: number, mayGrow?: () => boolean): number | undefined {
    let sources = end;
    while (sources > 0 && this.#scratch[sources - 1] === 0) sources--;
    const bits = this.#scratch.subarray(0, this.#rows.widthFor(sources));
    const byName = this.#byNameOf(bits.length);
    const name = nameOf(bits, copies);
    this.work += workOfSet + bits.length / bytesPerWork + workPerCopy * copies.size;
    const known = byName.get(name);
    // One that has still to be settled will have another name.
    if (known !== undefined && this.#isSettled(known)) {
      this.#seen[known] = this.#pass;
      return known;
    }
    if (mayGrow?.() === false) return undefined;
    const id = this.#free.pop() ?? this.#copies.length;
    this.#rows.add(id, bits);
    this.#copies[id] = copies;
    this.#leadsTo[id] = id;
    this.#settled[id] = this.#clears.count;
    this.#names[id] = name;
    byName.set(name, id);
    this.#seen[id] = this.#pass;
    this.#live++;
    return id;
  }

  #byNameOf(width: number): Map<string, number> {
    let byName = this.#byName.get(width);
    if (byName === undefined) {
      byName = new Map();
      this.#byName.set(width, byName);
    }
    return byName;
  }
}

function copiesWith(before: Copies, holder: number, count: number): Copies {
  if (count <= 1 && !before.has(holder)) return before;
  const copies = new Map(before);
  if (count > 1) copies.set(holder, count);
  else copies.delete(holder);
  return copies.size === 0 ? singles : copies;
}

function nameOf(bits: Uint8Array, copies: Copies): string {
  const name = Buffer.from(bits.buffer, bits.byteOffset, bits.length).toString('latin1');
  if (copies.size === 0) return name;
  return `${name}|${[...copies].sort(([a], [b]) => a - b).join()}`;
}
