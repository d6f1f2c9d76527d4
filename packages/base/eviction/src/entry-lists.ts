/**
 * Doubly linked lists of entries in parallel typed arrays (after node-lru-cache's layout): what the policies are made of.
 *
 *     head ⇄ entry ⇄ entry ⇄ … ⇄ tail          next → warmer, previous → colder
 *     (coldest)                 (warmest)
 *
 * Invariant: a tracked entry is on exactly one list, once. Every operation is O(1) and allocates nothing once grown.
 */
import { invariant } from '@kvtier/errors';
import type { EntryIndex } from './policy.ts';
import { copied } from './spare-copies.ts';

/** Link of an entry at an end of its list, head and tail of an empty list. */
export const none = -1;
/** List of an entry that is not tracked. */
const untracked = -1;

export class EntryLists {
  #warmer: Int32Array = new Int32Array(64);
  #colder: Int32Array = new Int32Array(64);
  #list: Int16Array = new Int16Array(64).fill(untracked);
  readonly #heads: Int32Array;
  readonly #tails: Int32Array;
  readonly #counts: Int32Array;
  readonly #owner: string;
  /** Entries on all lists. */
  count = 0;

  /** `owner`: the policy's name, for messages. */
  constructor(owner: string, listCount: number) {
    this.#owner = owner;
    this.#heads = new Int32Array(listCount).fill(none);
    this.#tails = new Int32Array(listCount).fill(none);
    this.#counts = new Int32Array(listCount);
  }

  has(entry: EntryIndex): boolean {
    return entry >= 0 && entry < this.#list.length && this.#list[entry] !== untracked;
  }

  /** The list that a tracked entry is on. */
  listOf(entry: EntryIndex): number {
    invariant(this.has(entry), () => `${this.#owner}: entry ${entry} is not tracked`);
    return this.#list[entry]!;
  }

  countOf(list: number): number {
    return this.#counts[list]!;
  }

  /** The coldest entry of a list, or `none`. */
  coldest(list: number): EntryIndex {
    return this.#heads[list]!;
  }

  /** The next warmer entry of the same list, or `none`. */
  warmer(entry: EntryIndex): EntryIndex {
    return this.#warmer[entry]!;
  }

  /** The next colder entry of the same list, or `none`. */
  colder(entry: EntryIndex): EntryIndex {
    return this.#colder[entry]!;
  }

  /** Track an entry as the warmest of a list. */
  append(list: number, entry: EntryIndex): void {
    this.#claim(list, entry);
    this.#link(list, entry, this.#tails[list]!, none);
  }

  /** Track an entry as the next colder one of `neighbour`, on its list. */
  insertColderThan(neighbour: EntryIndex, entry: EntryIndex): void {
    const list = this.listOf(neighbour);
    this.#claim(list, entry);
    this.#link(list, entry, this.#colder[neighbour]!, neighbour);
  }

  /** Make a tracked entry the warmest of a list, its own or another. */
  move(list: number, entry: EntryIndex): void {
    if (this.#tails[list] === entry) return;
    this.remove(entry);
    this.append(list, entry);
  }

  remove(entry: EntryIndex): void {
    const list = this.listOf(entry);
    const colder = this.#colder[entry]!;
    const warmer = this.#warmer[entry]!;
    if (colder === none) this.#heads[list] = warmer;
    else this.#warmer[colder] = warmer;
    if (warmer === none) this.#tails[list] = colder;
    else this.#colder[warmer] = colder;
    this.#list[entry] = untracked;
    this.#counts[list]!--;
    this.count--;
  }

  /** Becomes what the other one is, which has as many lists; without a step for each entry. */
  copyFrom(other: EntryLists): void {
    this.#warmer = copied(this.#warmer, other.#warmer);
    this.#colder = copied(this.#colder, other.#colder);
    this.#list = copied(this.#list, other.#list);
    this.#heads.set(other.#heads);
    this.#tails.set(other.#tails);
    this.#counts.set(other.#counts);
    this.count = other.count;
  }

  *entriesOf(list: number): Iterable<EntryIndex> {
    for (let entry = this.coldest(list); entry !== none; entry = this.warmer(entry)) yield entry;
  }

  checkIntegrity(): void {
    let total = 0;
    for (let list = 0; list < this.#heads.length; list++) {
      let count = 0;
      let colder = none;
      for (const entry of this.entriesOf(list)) {
        invariant(this.#colder[entry] === colder, () => `${this.#owner}: entry ${entry} does not link back`);
        invariant(this.#list[entry] === list, () => `${this.#owner}: entry ${entry} is on another list than it says`);
        invariant(++count <= this.#counts[list]!, `${this.#owner}: a list is longer than its count`);
        colder = entry;
      }
      invariant(count === this.#counts[list] && colder === this.#tails[list], `${this.#owner}: a list ends early`);
      total += count;
    }
    const tracked = this.#list.reduce((sum, list) => sum + (list === untracked ? 0 : 1), 0);
    invariant(total === this.count && tracked === this.count, `${this.#owner}: an entry is tracked but on no list`);
  }

  #claim(list: number, entry: EntryIndex): void {
    invariant(Number.isInteger(entry) && entry >= 0, () => `${this.#owner}: ${entry} is not an entry`);
    invariant(!this.has(entry), () => `${this.#owner}: entry ${entry} is tracked already`);
    if (entry >= this.#list.length) this.#grow(Math.max(entry + 1, this.#list.length * 2));
    this.#list[entry] = list;
    this.#counts[list]!++;
    this.count++;
  }

  #link(list: number, entry: EntryIndex, colder: EntryIndex, warmer: EntryIndex): void {
    this.#colder[entry] = colder;
    this.#warmer[entry] = warmer;
    if (colder === none) this.#heads[list] = entry;
    else this.#warmer[colder] = entry;
    if (warmer === none) this.#tails[list] = entry;
    else this.#colder[warmer] = entry;
  }

  #grow(length: number): void {
    const warmer = new Int32Array(length);
    warmer.set(this.#warmer);
    this.#warmer = warmer;
    const colder = new Int32Array(length);
    colder.set(this.#colder);
    this.#colder = colder;
    const list = new Int16Array(length).fill(untracked);
    list.set(this.#list);
    this.#list = list;
  }
}
