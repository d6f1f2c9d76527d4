/**
 * S3-FIFO (Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023).
 *
 *     insert ──▶ small (a tenth) ──used again──▶ main ──unused──▶ out         ghost: names that left `small` unused;
 *                  └──used at most once──▶ out, name to ghost     ◀──used── └─┘      one that comes back goes to main
 *
 * What is never used again leaves quickly and does not push out what is. Uses are counted up to 3. Aging happens inside
 * `victim`, so that nothing is moved before there is need. Ghosts need the entry's name (`InsertHint.name`); without
 * names there are none. As the queues take turns, an entry's children are looked for (chain-queues.ts).
 */
import { ChainQueues, parentsPassed } from './chain-queues.ts';
import { none } from './entry-lists.ts';
import type { EntryIndex, InsertHint } from './policy.ts';

const small = 0;
const main = 1;
const usesMax = 3;
/** Uses after its insertion that bring an entry from `small` to `main`. */
const promotionUses = 2;

export class S3FifoPolicy extends ChainQueues {
  readonly name = 's3-fifo';
  #uses: Uint8Array = new Uint8Array(64);
  readonly #names = new Map<EntryIndex, number>();
  /** Names, oldest first; as many as entries in `main`. */
  readonly #ghosts = new Set<number>();
  /** What `victim` chose last: its removal is an eviction. */
  #chosen: EntryIndex = none;
  /** Entries that came from `small` to `main`. */
  #promotions = 0;

  constructor(mayPass = parentsPassed) {
    super('s3-fifo', 2, mayPass);
  }

  insert(entry: EntryIndex, _nowUs: number, hint?: InsertHint): void {
    const { parent, name } = hint ?? {};
    const returns = name !== undefined && this.#ghosts.has(name);
    const above = parent !== undefined && this.has(parent) ? parent : undefined;
    const isBesideYoung = above !== undefined && this.queueOf(above) === small;
    this.track(returns && !isBesideYoung ? main : small, entry, above);
    if (returns) this.#ghosts.delete(name);
    if (name !== undefined) this.#names.set(entry, name);
    this.#setUses(entry, 0);
  }

  touch(entry: EntryIndex, _nowUs: number): void {
    this.lists.listOf(entry); // tracked
    this.#uses[entry] = Math.min(this.#uses[entry]! + 1, usesMax);
  }

  override remove(entry: EntryIndex): void {
    const home = this.homeOf(entry);
    super.remove(entry);
    const name = this.#names.get(entry);
    this.#names.delete(entry);
    if (entry === this.#chosen && home === small && name !== undefined) this.#ghosts.add(name);
    if (entry === this.#chosen) this.#chosen = none;
    for (const oldest of this.#ghosts) {
      if (this.#ghosts.size <= Math.max(1, this.lists.count)) break;
      this.#ghosts.delete(oldest);
    }
  }

  protected override next(mayGo: (entry: EntryIndex) => boolean): EntryIndex | undefined {
    const found = super.next(mayGo);
    this.#chosen = found ?? none;
    return found;
  }

  protected choose(mayGo: (entry: EntryIndex) => boolean): EntryIndex | undefined {
    const smallCount = this.lists.countOf(small);
    const smallFirst = smallCount * 10 >= smallCount + this.lists.countOf(main); // of what can be chosen
    if (smallFirst) return this.#fromSmall(mayGo) ?? this.#fromMain(mayGo);
    const before = this.#promotions;
    const found = this.#fromMain(mayGo) ?? this.#fromSmall(mayGo);
    // What came to `main` just now has not been asked about.
    return found === undefined && this.#promotions > before ? this.#fromMain(mayGo) : found;
  }

  /** Without names: it will not be told which of its choices were evicted. */
  protected copy(): S3FifoPolicy {
    const copy = new S3FifoPolicy(this.mayPass);
    this.copyOrderTo(copy);
    copy.#uses = this.#uses.slice();
    return copy;
  }

  #fromSmall(mayEvict: (entry: EntryIndex) => boolean): EntryIndex | undefined {
    return this.walk(small, (entry) => {
      if (this.#uses[entry]! < promotionUses) return mayEvict(entry) ? 'chosen' : 'stays';
      this.lists.move(main, entry);
      this.#uses[entry] = 0;
      this.#promotions++;
      return 'moved';
    });
  }

  #fromMain(mayEvict: (entry: EntryIndex) => boolean): EntryIndex | undefined {
    // Every use buys one more round, as with CLOCK; what may not go keeps its place and its uses.
    return this.walk(main, (entry) => {
      if (!mayEvict(entry)) return 'stays';
      if (this.#uses[entry] === 0) return 'chosen';
      this.#uses[entry]!--;
      this.lists.move(main, entry);
      return 'moved';
    });
  }

  #setUses(entry: EntryIndex, uses: number): void {
    if (entry >= this.#uses.length) {
      const grown = new Uint8Array(Math.max(entry + 1, this.#uses.length * 2));
      grown.set(this.#uses);
      this.#uses = grown;
    }
    this.#uses[entry] = uses;
  }
}
