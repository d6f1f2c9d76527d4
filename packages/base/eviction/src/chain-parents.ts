/**
 * Who depends on whom among tracked entries, for a policy whose order alone does not keep children behind their parents.
 * An entry's number is reused after its removal; its generation tells the old bearer's children from the new one's.
 */
import type { EntryIndex } from './policy.ts';

const none = -1;

export class ChainParents {
  #parents: Int32Array = new Int32Array(64).fill(none);
  #parentGenerations: Uint32Array = new Uint32Array(64);
  #generations: Uint32Array = new Uint32Array(64);
  #childCounts: Uint32Array = new Uint32Array(64);

  /** `parent`: tracked, or undefined. */
  add(entry: EntryIndex, parent: EntryIndex | undefined): void {
    if (entry >= this.#parents.length) this.#grow(Math.max(entry + 1, this.#parents.length * 2));
    this.#generations[entry]!++;
    this.#childCounts[entry] = 0;
    this.#parents[entry] = parent ?? none;
    if (parent === undefined) return;
    this.#parentGenerations[entry] = this.#generations[parent]!;
    this.#childCounts[parent]!++;
  }

  remove(entry: EntryIndex): void {
    const parent = this.#parents[entry]!;
    this.#generations[entry]!++;
    if (parent !== none && this.#generations[parent] === this.#parentGenerations[entry]) this.#childCounts[parent]!--;
  }

  hasChildren(entry: EntryIndex): boolean {
    return this.#childCounts[entry]! > 0;
  }

  childCountOf(entry: EntryIndex): number {
    return this.#childCounts[entry]!;
  }

  /** The parent, while it is tracked. */
  parentOf(entry: EntryIndex): EntryIndex | undefined {
    const parent = this.#parents[entry]!;
    return parent !== none && this.#generations[parent] === this.#parentGenerations[entry] ? parent : undefined;
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
  }
}
