/**
 * S3-FIFO (Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023).
 *
 *     insert ──▶ small (a tenth) ──used again──▶ main ──unused──▶ out         ghost: names that left `small` unused;
 *                  └──used at most once──▶ out, name to ghost     ◀──used── └─┘      one that comes back goes to main
 *
 * What is never used again leaves quickly and does not push out what is. Uses are counted up to 3. Aging happens inside
 * `victim`, so that nothing is moved before there is need. Where nearly all is used, one walk brings so many to `main`, or around in it,
 * and no more: then the coldest of `main` goes, used or not, and nobody waits for a step for each entry.
 *
 * Ghosts need the entry's name (`InsertHint.name`); without names there are none. As the queues take turns, an entry's children are looked
 * for (chain-queues.ts).
 */
import { ChainQueues, parentsPassed } from './chain-queues.ts';
import { none } from './entry-lists.ts';
import type { EntryIndex, InsertHint } from './policy.ts';
import { copied } from './spare-copies.ts';

const noName = -1;
const small = 0;
const main = 1;
const usesMax = 3;
/** Uses after its insertion that bring an entry from `small` to `main`. */
const promotionUses = 2;
const leastGhosts = 64;
/** Moves of one walk over a queue: a millisecond or two. */
const mostMoves = 4096;

export class S3FifoPolicy extends ChainQueues {
  readonly name = 's3-fifo';
  #uses: Uint8Array = new Uint8Array(64);
  /** By entry; `noName`: it has none. */
  #names: Float64Array = new Float64Array(64).fill(noName);
  readonly #mostMoves: number;
  /** Names, oldest first; as many as there are entries. */
  readonly #ghosts = new Set<number>();
  /** Stands before the oldest: whoever looked for it from the beginning would pass over all that are gone, each time. */
  #oldestGhosts = this.#ghosts.values();
  /** Until it is made anew: V8 keeps every table that the set has had since, as long as an iterator stands in an old one. */
  #ghostsLeft = leastGhosts;
  /** What `victim` chose last: its removal is an eviction. */
  #chosen: EntryIndex = none;
  /** Entries that came from `small` to `main`. */
  #promotions = 0;

  constructor(mayPass = parentsPassed, most = mostMoves) {
    super('s3-fifo', 2, mayPass);
    this.#mostMoves = most;
  }

  insert(entry: EntryIndex, _nowUs: number, hint?: InsertHint): void {
    const { parent, name, comesLate = false } = hint ?? {};
    const returns = name !== undefined && this.#ghosts.has(name);
    const above = parent !== undefined && this.has(parent) ? parent : undefined;
    const isBesideYoung = above !== undefined && !comesLate && this.queueOf(above) === small;
    this.track(returns && !isBesideYoung ? main : small, entry, above, comesLate);
    if (returns) this.#ghosts.delete(name);
    this.#growTo(entry);
    this.#names[entry] = name ?? noName;
    this.#uses[entry] = 0;
  }

  touch(entry: EntryIndex, _nowUs: number): void {
    this.lists.listOf(entry); // tracked
    this.#uses[entry] = Math.min(this.#uses[entry]! + 1, usesMax);
  }

  override remove(entry: EntryIndex): void {
    const home = this.homeOf(entry);
    super.remove(entry);
    const name = this.#names[entry]!;
    if (entry === this.#chosen && home === small && name !== noName) this.#remember(name);
    if (entry === this.#chosen) this.#chosen = none;
    while (this.#ghosts.size > Math.max(1, this.lists.count)) this.#ghosts.delete(this.#oldestGhosts.next().value!);
  }

  #remember(name: number): void {
    this.#ghosts.add(name);
    if (--this.#ghostsLeft > 0) return;
    this.#ghostsLeft = Math.max(leastGhosts, this.#ghosts.size);
    this.#oldestGhosts = this.#ghosts.values();
  }

  protected override next(mayGo: (entry: EntryIndex) => boolean): EntryIndex | undefined {
    const found = super.next(mayGo);
    this.#chosen = found ?? none;
    return found;
  }

  protected choose(mayGo: (entry: EntryIndex) => boolean): EntryIndex | undefined {
    const smallCount = this.lists.countOf(small);
    const smallFirst = smallCount * 10 >= smallCount + this.lists.countOf(main); // of what can be chosen
    let found = smallFirst ? undefined : this.#fromMain(mayGo);
    let promotions = this.#mostMoves;
    // There may be more in `small` only where the walk over it has ended for its length.
    while (found === undefined && promotions === this.#mostMoves) {
      const before = this.#promotions;
      // What comes to `main` now has not been asked about.
      found = this.#fromSmall(mayGo) ?? this.#fromMain(mayGo);
      promotions = this.#promotions - before;
    }
    return found;
  }

  protected empty(): S3FifoPolicy {
    return new S3FifoPolicy(this.mayPass, this.#mostMoves);
  }

  /** Without names: it will not be told which of its choices were evicted. */
  protected override copyFrom(other: S3FifoPolicy): void {
    super.copyFrom(other);
    this.#uses = copied(this.#uses, other.#uses);
    if (this.#names.length < this.#uses.length) this.#names = new Float64Array(this.#uses.length).fill(noName);
  }

  #fromSmall(mayEvict: (entry: EntryIndex) => boolean): EntryIndex | undefined {
    let left = this.#mostMoves;
    return this.walk(small, (entry) => {
      if (this.#uses[entry]! < promotionUses) return mayEvict(entry) ? 'chosen' : 'stays';
      if (left === 0) return 'left';
      left--;
      this.lists.move(main, entry);
      this.#uses[entry] = 0;
      this.#promotions++;
      return 'moved';
    });
  }

  #fromMain(mayEvict: (entry: EntryIndex) => boolean): EntryIndex | undefined {
    let left = this.#mostMoves;
    // Every use buys one more round, as with CLOCK; what may not go keeps its place and its uses.
    return this.walk(main, (entry) => {
      if (!mayEvict(entry)) {
        if (this.queueOf(entry) === none) left--; // a parent, put aside
        return 'stays';
      }
      if (this.#uses[entry] === 0 || left <= 0) return 'chosen';
      left--;
      this.#uses[entry]!--;
      this.lists.move(main, entry);
      return 'moved';
    });
  }

  #growTo(entry: EntryIndex): void {
    if (entry < this.#uses.length) return;
    const length = Math.max(entry + 1, this.#uses.length * 2);
    const uses = new Uint8Array(length);
    uses.set(this.#uses);
    this.#uses = uses;
    const names = new Float64Array(length);
    names.set(this.#names);
    this.#names = names;
  }
}
