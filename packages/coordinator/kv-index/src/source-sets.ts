/**
 * Who holds a block, as a number. The blocks of a cluster are many, the sets of their holders few: chains are held by the same
 * engines and nodes from end to end. So every set exists once and is named by a small integer (hash consing: Ershov 1958),
 * and "this source holds it on that medium, too" is a step from one number to another, remembered after the first time.
 *
 *     set 17:  bits[source] = media of that source, a bit each    copies: (source, medium) → count, where it is above 1
 *
 * A source that goes is taken out of all sets in one pass over the sets, not over the blocks: a set that named it becomes
 * another name of the set without it (`resolve`). Set 0 is empty.
 */
import { invariant } from '@kvtier/errors';

/** At most this many media per source: one bit each. */
export const maxMedia = 8;
/** Copies of one block in one place that are told apart; an engine's pool without de-duplication has two or three. */
const maxCopies = 255;
/** What a set costs beside its bits: object, map entry, name. */
const setOverheadBytes = 400;

interface HolderSet {
  readonly bits: Uint8Array;
  /** (source × maxMedia + medium) → copies, where there are several. */
  readonly copies: ReadonlyMap<number, number>;
}

export class SourceSets {
  readonly #maxSources: number;
  /** Media, a bit each, on which a source may hold a block several times. */
  readonly #countedMedia: number;
  readonly #sets: (HolderSet | undefined)[] = [];
  readonly #names = new Map<string, number>();
  /** Where a set that named a source that has gone leads to; itself otherwise. */
  readonly #leadsTo: number[] = [];
  readonly #free: number[] = [];
  /** The pass in which each set was last seen in use. */
  readonly #seen: number[] = [];
  #pass = 0;
  /** (set, holder) → set with one copy more; and one less. */
  readonly #more = new Map<number, number>();
  readonly #less = new Map<number, number>();
  #live = 0;

  constructor(maxSources: number, countedMedia: number) {
    invariant(maxSources > 0 && maxSources <= 4096, 'source sets: 1 to 4096 sources');
    this.#maxSources = maxSources;
    this.#countedMedia = countedMedia;
    this.#intern({ bits: new Uint8Array(maxSources), copies: new Map() });
  }

  /** Sets that exist. */
  get count(): number {
    return this.#live;
  }

  /** Memory of sets and of the steps between them. */
  get bytes(): number {
    return this.#live * (2 * this.#maxSources + setOverheadBytes) + (this.#more.size + this.#less.size) * 40;
  }

  /** The set that this number stands for now. */
  resolve(set: number): number {
    let at = set;
    while (this.#leadsTo[at] !== at) at = this.#leadsTo[at]!;
    return at;
  }

  exists(set: number): boolean {
    return this.#sets[this.resolve(set)] !== undefined;
  }

  /** Media of each source, by its number. Not to be changed; `set` is resolved. */
  bitsOf(set: number): Uint8Array {
    return this.#sets[set]!.bits;
  }

  /** One copy more. */
  with(set: number, source: number, medium: number): number {
    return this.#step(this.#more, set, source, medium, 1);
  }

  /** One copy less; the set itself when there was none. */
  without(set: number, source: number, medium: number): number {
    return this.#step(this.#less, set, source, medium, -1);
  }

  /** Nobody of this source's media holds anything any more. Of one medium, where it is given. O(sets). */
  clear(source: number, medium?: number): void {
    const mask = medium === undefined ? 0xff : 1 << medium;
    for (let id = 1; id < this.#sets.length; id++) {
      const set = this.#sets[id];
      if (set === undefined || this.#leadsTo[id] !== id || (set.bits[source]! & mask) === 0) continue;
      const bits = set.bits.slice();
      bits[source]! &= ~mask;
      const copies = new Map(
        [...set.copies].filter(([holder]) => {
          const medium = holder % maxMedia;
          return (holder - medium) / maxMedia !== source || ((1 << medium) & mask) === 0;
        }),
      );
      this.#names.delete(nameOf(set));
      this.#leadsTo[id] = this.#intern({ bits, copies });
    }
    this.#more.clear();
    this.#less.clear();
  }

  /** This number is in use; so is what it leads to. */
  see(set: number): void {
    this.#seen[set] = this.#pass;
  }

  /**
   * Forgets the sets that were not seen since the last call, and begins anew. The caller has seen every number that it
   * holds; what was made meanwhile counts as seen.
   */
  endPass(): void {
    for (let id = 1; id < this.#sets.length; id++) {
      const set = this.#sets[id];
      if (set === undefined || this.#seen[id] === this.#pass) continue;
      if (this.#leadsTo[id] === id) this.#names.delete(nameOf(set));
      this.#sets[id] = undefined;
      this.#leadsTo[id] = id;
      this.#free.push(id);
      this.#live--;
    }
    this.#pass++;
    this.#more.clear();
    this.#less.clear();
  }

  #step(steps: Map<number, number>, set: number, source: number, medium: number, by: 1 | -1): number {
    const holder = source * maxMedia + medium;
    const step = set * (this.#maxSources * maxMedia) + holder;
    const known = steps.get(step);
    if (known !== undefined) {
      this.#seen[known] = this.#pass;
      return known;
    }
    const before = this.#sets[set]!;
    const count = ((before.bits[source]! >>> medium) & 1) === 0 ? 0 : (before.copies.get(holder) ?? 1);
    const most = ((this.#countedMedia >>> medium) & 1) === 1 ? maxCopies : 1;
    const next = Math.min(Math.max(count + by, 0), most);
    let to = set;
    if (next !== count) {
      const bits = before.bits.slice();
      const copies = new Map(before.copies);
      if (next === 0) bits[source]! &= ~(1 << medium);
      else bits[source]! |= 1 << medium;
      if (next > 1) copies.set(holder, next);
      else copies.delete(holder);
      to = this.#intern({ bits, copies });
    }
    steps.set(step, to);
    return to;
  }

  #intern(set: HolderSet): number {
    const name = nameOf(set);
    const known = this.#names.get(name);
    if (known !== undefined) {
      this.#seen[known] = this.#pass;
      return known;
    }
    const id = this.#free.pop() ?? this.#sets.length;
    this.#sets[id] = set;
    this.#leadsTo[id] = id;
    this.#names.set(name, id);
    this.#seen[id] = this.#pass;
    this.#live++;
    return id;
  }
}

function nameOf({ bits, copies }: HolderSet): string {
  const name = Buffer.from(bits.buffer, bits.byteOffset, bits.length).toString('latin1');
  if (copies.size === 0) return name;
  return `${name}|${[...copies].sort(([a], [b]) => a - b).join()}`;
}
