/**
 * Blocks of one slot size, which can take each other's place: the order in which they leave.
 *
 *     in the policy's order ──passed over, among many──▶ aside ──nobody uses it any more──▶ in that order again
 *
 * What is kept for long is passed over once (kit/passing-over.ts). Where no touch makes a block the warmest, it is put aside, with what is
 * kept of its chain: `s3-fifo` walks over all parents, and asks about none of them.
 *
 * Invariant: a block is the policy's or aside; what is aside is in use.
 */
import { invariant } from '@kvtier/errors';
import { createPolicy, type EntryIndex, type EvictionPolicy, type PolicyName } from '@kvtier/eviction';
import { manyPassed, victimPassingOver } from '../kit/passing-over.ts';

/** No other policy counts more. */
const maxUses = 3;

export interface Ranked {
  /** Its number in the policy. */
  readonly index: EntryIndex;
  /** Since it was published, up to `maxUses`: what is put aside comes back with them. */
  uses: number;
  /** When it was published or used last. */
  readonly usedUs: number;
}

export interface SizeClassOptions<E> {
  readonly policy: PolicyName;
  /** Nobody uses it: its slot can be given away. */
  readonly isIdle: (entry: E) => boolean;
  /** The parent of a block, if this class has it. */
  readonly parentOf: (entry: E) => E | undefined;
  /** So many in use keep their place; default: 64. */
  readonly mayPass?: number | undefined;
}

export class SizeClass<E extends Ranked> {
  readonly #options: SizeClassOptions<E>;
  readonly #policy: EvictionPolicy;
  readonly #entries: (E | undefined)[] = [];
  readonly #freeIndexes: EntryIndex[] = [];
  readonly #aside = new Set<E>();

  constructor(options: SizeClassOptions<E>) {
    this.#options = options;
    this.#policy = createPolicy(options.policy);
  }

  /** The number that the next entry is to have. */
  get nextIndex(): EntryIndex {
    return this.#freeIndexes.at(-1) ?? this.#entries.length;
  }

  add(entry: E): void {
    this.#freeIndexes.pop();
    this.#entries[entry.index] = entry;
    this.#insert(entry);
  }

  remove(entry: E): void {
    if (!this.#aside.delete(entry)) this.#policy.remove(entry.index);
    this.#entries[entry.index] = undefined;
    this.#freeIndexes.push(entry.index);
  }

  touch(entry: E): void {
    entry.uses = Math.min(entry.uses + 1, maxUses);
    if (!this.#aside.has(entry)) this.#policy.touch(entry.index, entry.usedUs);
  }

  /** Nobody uses it any more. */
  idle(entry: E): void {
    if (!this.#aside.delete(entry)) return;
    this.#insert(entry);
    for (let use = 0; use < entry.uses; use++) this.#policy.touch(entry.index, entry.usedUs);
  }

  /** The coldest that nobody uses. */
  coldest(): E | undefined {
    const { isIdle, mayPass } = this.#options;
    const victim = victimPassingOver(this.#policy, {
      mayGo: (index) => isIdle(this.#entries[index]!),
      mayPass,
      onPassed: (passed) => this.#putAside(Array.from(passed, (index) => this.#entries[index]!)),
    });
    return victim === undefined ? undefined : this.#entries[victim];
  }

  /** The coldest of those that `mayGo`. */
  coldestOf(mayGo: (entry: E) => boolean): E | undefined {
    const victim = this.#policy.victim((index) => mayGo(this.#entries[index]!));
    return victim === undefined ? undefined : this.#entries[victim];
  }

  /** All of them; throws InvariantError when their order is broken. */
  checked(): E[] {
    this.#policy.checkIntegrity();
    const all = this.#entries.filter((entry) => entry !== undefined);
    invariant(this.#policy.count + this.#aside.size === all.length, 'arena: policy and entries disagree');
    for (const entry of all) {
      invariant(this.#policy.has(entry.index) !== this.#aside.has(entry), 'arena: an entry is in no order');
      invariant(!this.#aside.has(entry) || !this.#options.isIdle(entry), 'arena: what nobody uses is aside');
    }
    return all;
  }

  #insert(entry: E): void {
    this.#policy.insert(entry.index, entry.usedUs, { parent: this.#options.parentOf(entry)?.index });
  }

  /** If they are many, with what is kept of their chains. */
  #putAside(passed: readonly E[]): void {
    const { isIdle, parentOf, mayPass = manyPassed } = this.#options;
    const kept = new Set(passed);
    for (const entry of passed) {
      for (let above = parentOf(entry); above !== undefined; above = parentOf(above)) {
        if (kept.has(above) || this.#aside.has(above) || isIdle(above)) break;
        kept.add(above);
      }
    }
    if (kept.size <= mayPass) return;
    for (const entry of kept) {
      this.#policy.remove(entry.index);
      this.#aside.add(entry);
    }
  }
}
