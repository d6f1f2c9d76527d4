/**
 * Who depends on whom among tracked entries, for a policy whose order alone does not keep children behind their parents.
 * An entry's number is reused after its removal; its generation tells the old bearer's children from the new one's.
 */
import type { EntryIndex } from './policy.ts';
import { copied } from './spare-copies.ts';

const none = -1;
/** Of an entry: it is parked; and so is all that follows it, so that it is kept with all of that. */
const parked = 1;
const kept = 2;

export class ChainParents {
  #parents: Int32Array = new Int32Array(64).fill(none);
  #parentGenerations: Uint32Array = new Uint32Array(64);
  #generations: Uint32Array = new Uint32Array(64);
  #childCounts: Uint32Array = new Uint32Array(64);
  /** Of these, those that are kept. */
  #keptCounts: Uint32Array = new Uint32Array(64);
  #states: Uint8Array = new Uint8Array(64);

  /** `parent`: tracked, or undefined. Returns, as the calls below, the one that is not parked whose children are others now, or other. */
  add(entry: EntryIndex, parent: EntryIndex | undefined): EntryIndex | undefined {
    if (entry >= this.#parents.length) this.#grow(Math.max(entry + 1, this.#parents.length * 2));
    this.#generations[entry]!++;
    this.#childCounts[entry] = 0;
    this.#keptCounts[entry] = 0;
    this.#states[entry] = 0;
    this.#parents[entry] = parent ?? none;
    if (parent === undefined) return undefined;
    this.#parentGenerations[entry] = this.#generations[parent]!;
    this.#childCounts[parent]!++;
    return this.#changed(parent);
  }

  remove(entry: EntryIndex): EntryIndex | undefined {
    const parent = this.parentOf(entry);
    this.#generations[entry]!++;
    if (parent === undefined) return undefined;
    this.#childCounts[parent]!--;
    if ((this.#states[entry]! & kept) !== 0) this.#keptCounts[parent]!--;
    return this.#changed(parent);
  }

  park(entry: EntryIndex): EntryIndex | undefined {
    this.#states[entry]! |= parked;
    return this.#changed(entry);
  }

  unpark(entry: EntryIndex): EntryIndex | undefined {
    const wasKept = (this.#states[entry]! & kept) !== 0;
    this.#states[entry] = 0;
    const parent = this.parentOf(entry);
    if (!wasKept || parent === undefined) return undefined;
    this.#keptCounts[parent]!--;
    return this.#changed(parent);
  }

  hasChildren(entry: EntryIndex): boolean {
    return this.#childCounts[entry]! > 0;
  }

  childCountOf(entry: EntryIndex): number {
    return this.#childCounts[entry]!;
  }

  keptChildCountOf(entry: EntryIndex): number {
    return this.#keptCounts[entry]!;
  }

  copyFrom(other: ChainParents): void {
    this.#parents = copied(this.#parents, other.#parents);
    this.#parentGenerations = copied(this.#parentGenerations, other.#parentGenerations);
    this.#generations = copied(this.#generations, other.#generations);
    this.#childCounts = copied(this.#childCounts, other.#childCounts);
    this.#keptCounts = copied(this.#keptCounts, other.#keptCounts);
    this.#states = copied(this.#states, other.#states);
  }

  /** The parent, while it is tracked. */
  parentOf(entry: EntryIndex): EntryIndex | undefined {
    const parent = this.#parents[entry]!;
    return parent !== none && this.#generations[parent] === this.#parentGenerations[entry] ? parent : undefined;
  }

  /** Its children are others, or other: so may be whether it is kept, and with that whether those above it are. No further than that goes. */
  #changed(entry: EntryIndex): EntryIndex | undefined {
    let at: EntryIndex | undefined = entry;
    while (at !== undefined && (this.#states[at]! & parked) !== 0) {
      const isKept = this.#keptCounts[at] === this.#childCounts[at];
      if (isKept === ((this.#states[at]! & kept) !== 0)) return undefined;
      this.#states[at] = isKept ? parked | kept : parked;
      at = this.parentOf(at);
      if (at !== undefined) this.#keptCounts[at]! += isKept ? 1 : -1;
    }
    return at;
  }

  #grow(length: number): void {
    const parents = new Int32Array(length).fill(none);
    parents.set(this.#parents);
    this.#parents = parents;
    const grow = (from: Uint32Array): Uint32Array => {
      const grown = new Uint32Array(length);
      grown.set(from);
      return grown;
    };
    this.#parentGenerations = grow(this.#parentGenerations);
    this.#generations = grow(this.#generations);
    this.#childCounts = grow(this.#childCounts);
    this.#keptCounts = grow(this.#keptCounts);
    const states = new Uint8Array(length);
    states.set(this.#states);
    this.#states = states;
  }
}
