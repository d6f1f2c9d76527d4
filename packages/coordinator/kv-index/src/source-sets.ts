/**
 * Who holds a block, as a number. The blocks of a cluster are many, the sets of their holders few: chains are held by the same
 * engines and nodes from end to end. So every set exists once and is named by a small integer (hash consing: Ershov 1958),
 * and "this source holds it on that medium, too" is a step from one number to another, remembered after the first time.
 *
 *     set 17:  bits[source] = media of that source, a bit each    copies: (source, medium) → count, where it is above 1
 *
 * A source that goes is not looked for: it is noted, and each set is without it as soon as anybody asks for the set (`resolve`), which then
 * is another name of what is left. What nobody names any more is collected a set at a time. So nothing here takes all sets at once.
 * Set 0 is empty.
 */
import { invariant } from '@kvtier/errors';
import { SetRows } from './set-rows.ts';

/** At most this many media per source: one bit each. */
export const maxMedia = 8;
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
  /** Times that something was cleared. */
  #clears = 0;
  /** Of each set: what was cleared until then is out of it. */
  readonly #settled: number[] = [];
  /** source × maxMedia + medium → the last of these that cleared it. */
  #clearedAt: Float64Array;
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
    this.#clearedAt = new Float64Array(this.#scratch.length * maxMedia);
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
    const before = this.#clearedAt;
    this.#clearedAt = new Float64Array(this.#scratch.length * maxMedia);
    this.#clearedAt.set(before);
    this.#forgetSteps();
  }

  /** The set that this number stands for now. */
  resolve(set: number): number {
    let at = set;
    while (this.#leadsTo[at] !== at) at = this.#leadsTo[at]!;
    if (this.#settled[at] !== this.#clears) at = this.#settle(at);
    if (at !== set) this.#leadsTo[set] = at; // not step by step again: a thousand sources may go at once
    return at;
  }

  exists(set: number): boolean {
    return this.#copies[this.resolve(set)] !== undefined;
  }

  /** Sources from this number on hold nothing. */
  widthOf(set: number): number {
    return this.#rows.widthOf(set);
  }

  /** Where the media of each source below `widthOf` lie, by its number, from `firstOf` on. Not to be changed; `set` is resolved. */
  slabOf(set: number): Uint8Array {
    return this.#rows.slabOf(set);
  }

  firstOf(set: number): number {
    return this.#rows.firstOf(set);
  }

  /** Media of one source. */
  mediaOf(set: number, source: number): number {
    return source < this.widthOf(set) ? this.slabOf(set)[this.firstOf(set) + source]! : 0;
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
    this.#clears++;
    const first = source * maxMedia;
    if (medium === undefined) this.#clearedAt.fill(this.#clears, first, first + maxMedia);
    else this.#clearedAt[first + medium] = this.#clears;
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

  /** Without what was cleared since it was asked for last. */
  #settle(id: number): number {
    if (this.#isSettled(id)) return id;
    const since = this.#settled[id]!;
    const width = this.widthOf(id);
    let copies = this.#copies[id]!;
    for (const holder of copies.keys()) if (this.#clearedAt[holder]! > since) copies = copiesWith(copies, holder, 0);
    this.#load(id);
    for (let source = 0; source < width; source++)
      this.#scratch[source]! &= ~this.#clearedOf(source, this.#scratch[source]!, since);
    this.#dissolve(id);
    const to = this.#intern(copies, width);
    this.#leadsTo[id] = to;
    return to;
  }

  /** Nothing of it was cleared. */
  #isSettled(id: number): boolean {
    const since = this.#settled[id]!;
    if (since === this.#clears) return true;
    const bits = this.bitsOf(id);
    this.work += bits.length / bytesPerWork;
    for (let source = 0; source < bits.length; source++)
      if (bits[source] !== 0 && this.#clearedOf(source, bits[source]!, since) !== 0) return false;
    this.#settled[id] = this.#clears;
    return true;
  }

  /** Of these media of a source, those that were cleared since then. */
  #clearedOf(source: number, media: number, since: number): number {
    let cleared = 0;
    for (let left = media; left !== 0; left &= left - 1) {
      const medium = 31 - Math.clz32(left & -left);
      if (this.#clearedAt[source * maxMedia + medium]! > since) cleared |= 1 << medium;
    }
    return cleared;
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
    set: number,
    source: number,
    medium: number,
    by: 1 | -1,
    mayGrow: () => boolean,
  ): number | undefined {
    const holder = source * maxMedia + medium;
    const step = set * (this.#scratch.length * maxMedia) + holder;
    const known = steps.get(step);
    if (known !== undefined) {
      this.#seen[known] = this.#pass;
      return known;
    }
    const media = this.mediaOf(set, source);
    const before = this.#copies[set]!;
    const count = ((media >>> medium) & 1) === 0 ? 0 : (before.get(holder) ?? 1);
    const most = ((this.#countedMedia >>> medium) & 1) === 1 ? maxCopies : 1;
    const next = Math.min(Math.max(count + by, 0), most);
    let to: number | undefined = set;
    if (next !== count) {
      const copies = copiesWith(before, holder, next);
      this.#load(set);
      this.#scratch[source] = next === 0 ? media & ~(1 << medium) : media | (1 << medium);
      to = this.#intern(copies, Math.max(this.widthOf(set), source + 1), mayGrow);
    }
    if (to !== undefined && mayGrow()) steps.set(step, to);
    return to;
  }

  #load(set: number): void {
    this.#scratch.set(this.bitsOf(set));
    this.#scratch.fill(0, this.widthOf(set));
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
    this.#settled[id] = this.#clears;
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
