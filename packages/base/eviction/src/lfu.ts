/**
 * Least frequently used with dynamic aging (LFU-DA: Arlitt, Cherkasova, Dilley, Friedrich and Jin, "Evaluating content management
 * techniques for web proxy caches", 2000): an entry's rank is its uses, up to 255, and the age of the store when it was used last; the age is
 * the rank of what was evicted last. So what was used often before and is not any more goes in the end, and newcomers stay meanwhile.
 *
 *     rank   age - 256 … age                age + 1 ……………………… age + 255
 *            what might not go before      │ a newcomer      │ used 255 times, the last time just now
 *
 * One list for each rank (the frequency lists of Shah, Mitra and Matani's O(1) LFU), ties by recency; lists of ranks that lie behind are used
 * anew. What stands there still, as it may not go for very long, comes to the end of one list that stands before all others, lower ranks
 * first, as they fall behind first. A few at a time, and the age waits for it: no turn is long.
 *
 * Chains: a use of a block is a use of its ancestors, and owners touch children before parents; so a parent has at least the uses of its
 * children, and at equal ranks it is the warmer one.
 */
import { EntryLists } from './entry-lists.ts';
import { firstOf, takeFirst } from './first-of.ts';
import type { EntryIndex, EvictionPolicy, InsertHint } from './policy.ts';
import { SpareCopies } from './spare-copies.ts';

const usesMax = 255;
/** Of ranks from `age` - 256 to `age` + 255. */
const ranked = 512;
/** Of what has a lower rank. */
const behind = ranked;
const lists = ranked + 1;
const none = -1;
/** In one turn. */
const mostPutBehind = 64;

export class LfuPolicy implements EvictionPolicy {
  readonly name = 'lfu';
  readonly #lists = new EntryLists('lfu', lists);
  readonly #copies = new SpareCopies(() => new EntryLists('lfu', lists));
  #uses: Uint8Array = new Uint8Array(64);
  #age = 0;
  /** No entry has a lower rank, but those behind. */
  #lowest = 0;
  /** What `victim` chose last: its removal is an eviction. */
  #chosen: EntryIndex = none;

  get count(): number {
    return this.#lists.count;
  }

  has(entry: EntryIndex): boolean {
    return this.#lists.has(entry);
  }

  insert(entry: EntryIndex, _nowUs: number, hint?: InsertHint): void {
    const parent = hint?.parent;
    const rank = this.#age + 1;
    const parentRank = parent !== undefined && this.has(parent) ? this.#rankOf(parent) : Number.POSITIVE_INFINITY;
    if (parentRank <= rank) this.#lists.insertColderThan(parent!, entry);
    else {
      this.#lists.append(rank % ranked, entry);
      this.#lowest = Math.min(this.#lowest, rank);
    }
    if (entry >= this.#uses.length) this.#grow(entry);
    this.#uses[entry] = 1;
  }

  touch(entry: EntryIndex, _nowUs: number): void {
    const uses = Math.min(this.#uses[entry]! + 1, usesMax);
    this.#raise(entry, uses);
    this.#uses[entry] = uses;
  }

  /** As if it had been used last just now. */
  refresh(entry: EntryIndex): boolean {
    this.#raise(entry, this.#uses[entry]!);
    return true;
  }

  remove(entry: EntryIndex): void {
    const rank = this.#rankOf(entry);
    this.#lists.remove(entry);
    if (entry !== this.#chosen) return;
    this.#chosen = none;
    this.#ageTo(rank);
  }

  victim(mayEvict: (entry: EntryIndex) => boolean): EntryIndex | undefined {
    let found: EntryIndex | undefined;
    for (const rank of this.#ranks()) {
      found = firstOf(this.#lists, this.#listOf(rank), mayEvict);
      if (found !== undefined) break;
    }
    this.#chosen = found ?? none;
    return found;
  }

  evict(count: number, mayEvict: (entry: EntryIndex) => boolean): EntryIndex[] {
    const taken: EntryIndex[] = [];
    let age = this.#age;
    for (const rank of this.#ranks()) {
      if (taken.length >= count) break;
      const before = taken.length;
      takeFirst(this.#lists, this.#listOf(rank), { count, mayEvict, taken });
      if (taken.length > before) age = rank;
    }
    this.#chosen = none;
    this.#ageTo(age);
    return taken;
  }

  coldestFirst(): Iterable<EntryIndex> {
    const source = this.#lists;
    const listsNow = (): number[] => Array.from(this.#ranks(), (rank) => this.#listOf(rank));
    return this.#copies.walk(function* (copy) {
      copy.copyFrom(source);
      for (const list of listsNow()) yield* copy.entriesOf(list);
    });
  }

  checkIntegrity(): void {
    this.#lists.checkIntegrity();
  }

  /** From the lowest on, those that somebody has. */
  *#ranks(): Iterable<number> {
    if (this.#lists.countOf(behind) > 0) yield this.#firstRank - 1;
    const last = this.#age + usesMax;
    this.#lowest = Math.max(this.#lowest, this.#firstRank);
    while (this.#lowest <= last && this.#lists.countOf(this.#lowest % ranked) === 0) this.#lowest++;
    for (let rank = this.#lowest; rank <= last; rank++) {
      if (this.#lists.countOf(rank % ranked) > 0) yield rank;
    }
  }

  /** The lowest that has a list of its own now. */
  get #firstRank(): number {
    return this.#age + usesMax + 1 - ranked;
  }

  #listOf(rank: number): number {
    return rank < this.#firstRank ? behind : rank % ranked;
  }

  /** Of a tracked entry. */
  #rankOf(entry: EntryIndex): number {
    const first = this.#firstRank;
    const list = this.#lists.listOf(entry);
    if (list === behind) return first - 1;
    const above = (list - first) % ranked;
    return first + (above < 0 ? above + ranked : above);
  }

  #raise(entry: EntryIndex, uses: number): void {
    this.#lists.listOf(entry); // tracked
    this.#lists.move((this.#age + uses) % ranked, entry);
    this.#lowest = Math.min(this.#lowest, this.#age + uses);
    if (entry === this.#chosen) this.#chosen = none;
  }

  /** Its next highest rank has the list of the lowest one, which has to be empty. */
  #ageTo(age: number): void {
    let left = mostPutBehind;
    for (; this.#age < age; this.#age++) {
      const list = (this.#age + usesMax + 1) % ranked;
      for (; this.#lists.countOf(list) > 0; left--) {
        if (left === 0) return;
        this.#lists.move(behind, this.#lists.coldest(list));
      }
    }
  }

  #grow(entry: EntryIndex): void {
    const uses = new Uint8Array(Math.max(entry + 1, this.#uses.length * 2));
    uses.set(this.#uses);
    this.#uses = uses;
  }
}
