/**
 * Blocks of one slot size, which can take each other's place: the order in which they leave.
 *
 *     in the policy's order ──passed over, among many──▶ aside ──nobody uses it any more──▶ in that order again
 *
 * What is kept for long is passed over once (kit/passing-over.ts). Where no touch makes a block the warmest, it is put aside, with what is
 * kept of its chain: the policy walks over all parents, and asks about none of them. It stays the policy's (`park`), as parent and child:
 * no block goes before its children, but where these are in use and nothing else may go.
 *
 * Invariant: what is aside is in use.
 */
import { invariant } from '@kvtier/errors';
import { createPolicy, type EntryIndex, type EvictionPolicy, type PolicyName } from '@kvtier/eviction';
import { manyPassed, mostPassed, victimPassingOver } from '../kit/passing-over.ts';

/** Policies that know again what they evicted: for others no name is made of each block that comes. */
const withNames: ReadonlySet<PolicyName> = new Set(['s3-fifo']);

/** Policies of which no touch changes a block's place: far behind what came last, a parent is no place for a new child. */
const byArrival: ReadonlySet<PolicyName> = new Set(['fifo', 's3-fifo']);

/** So often while its place wears out a chain that grows is refreshed; where it does not help, a child comes on its own as often. */
const refreshes = 4;

/** Of the arena: what is evicted sooner than such a part has come is not measured. */
const leastPart = 32;

/** Of one victim, in the mean. */
const victimWeight = 1 / 8;

/** Ancestors that are put aside in one turn, some milliseconds; the others are when a walk comes there. */
const mostAside = 4096;

export interface Ranked {
  /** Its number in the policy. */
  readonly index: EntryIndex;
  /** When it was published or used last. */
  readonly usedUs: number;
  /** Of `publishedBytes`: when it came to its place, or its parent did, next to which it stands. (Both are kept here.) */
  placedAtBytes: number;
  /** The same: when its chain was refreshed, or came. */
  toldAtBytes: number;
}

export interface SizeClassOptions<E> {
  readonly policy: PolicyName;
  /** Nobody uses it: its slot can be given away. */
  readonly isIdle: (entry: E) => boolean;
  /** The parent of a block, if this class has it. */
  readonly parentOf: (entry: E) => E | undefined;
  /** What it is (`InsertHint.name`). */
  readonly nameOf: (entry: E) => number;
  /** Of all blocks of all sizes that ever came. */
  readonly publishedBytes: () => number;
  readonly capacityBytes: number;
  /** So many in use keep their place; default: 64. */
  readonly mayPass?: number | undefined;
}

export class SizeClass<E extends Ranked> {
  readonly #options: SizeClassOptions<E>;
  readonly #policy: EvictionPolicy;
  readonly #entries: (E | undefined)[] = [];
  readonly #freeIndexes: EntryIndex[] = [];
  readonly #aside = new Set<E>();
  /** Bytes that come while a block goes from its place to the end, as victims show. */
  #wearBytes: number;
  /** Where a chain is to be put aside from the next time on, if it is there still. */
  #unfinished: E | undefined;

  constructor(options: SizeClassOptions<E>) {
    this.#options = options;
    this.#policy = createPolicy(options.policy);
    this.#wearBytes = options.capacityBytes;
  }

  /** The number that the next entry is to have. */
  get nextIndex(): EntryIndex {
    return this.#freeIndexes.at(-1) ?? this.#entries.length;
  }

  add(entry: E): void {
    this.#freeIndexes.pop();
    this.#entries[entry.index] = entry;
    const { policy, parentOf, nameOf, publishedBytes } = this.#options;
    const name = withNames.has(policy) ? nameOf(entry) : undefined;
    const parent = parentOf(entry);
    const nowBytes = publishedBytes();
    const isFar = parent !== undefined && nowBytes - parent.placedAtBytes > this.#wearBytes / refreshes;
    const comesLate = isFar && byArrival.has(policy);
    this.#policy.insert(entry.index, entry.usedUs, { parent: parent?.index, comesLate, name });
    entry.placedAtBytes = parent !== undefined && !comesLate ? parent.placedAtBytes : nowBytes;
    entry.toldAtBytes = parent?.toldAtBytes ?? nowBytes;
    if (comesLate) this.#refreshAbove(entry);
  }

  /** It is about to be removed in favour of another. */
  evicted(entry: E): void {
    const { publishedBytes, capacityBytes } = this.#options;
    const age = Math.min(capacityBytes, Math.max(capacityBytes / leastPart, publishedBytes() - entry.placedAtBytes));
    this.#wearBytes += (age - this.#wearBytes) * victimWeight;
  }

  remove(entry: E): void {
    this.#aside.delete(entry);
    this.#policy.remove(entry.index);
    this.#entries[entry.index] = undefined;
    this.#freeIndexes.push(entry.index);
  }

  touch(entry: E): void {
    this.#policy.touch(entry.index, entry.usedUs);
    if (!byArrival.has(this.#options.policy)) entry.placedAtBytes = this.#options.publishedBytes();
  }

  /** See `EvictionPolicy.refresh`. */
  refresh(entry: E): void {
    const { policy, publishedBytes } = this.#options;
    this.#policy.refresh(entry.index);
    entry.toldAtBytes = publishedBytes();
    if (!byArrival.has(policy)) entry.placedAtBytes = entry.toldAtBytes;
  }

  /** The chain that ends with this one is to be refreshed if it grows; `roomBytes`: what its owner may fill. */
  isDue(entry: E, roomBytes: number): boolean {
    return this.#options.publishedBytes() - entry.toldAtBytes >= Math.min(roomBytes, this.#wearBytes) / refreshes;
  }

  /** Nobody uses it any more. */
  idle(entry: E): void {
    if (this.#aside.delete(entry)) this.#policy.unpark!(entry.index);
  }

  /** The coldest that nobody uses. */
  coldest(): E | undefined {
    const { isIdle, mayPass } = this.#options;
    const goesOn = this.#unfinished !== undefined;
    if (goesOn) this.#goOnPuttingAside();
    const victim = victimPassingOver(this.#policy, {
      mayGo: (index) => isIdle(this.#entries[index]!),
      mayPass,
      onPassed: (passed) => {
        if (!goesOn) this.#putAside(Array.from(passed, (index) => this.#entries[index]!));
      },
    });
    return victim === undefined ? undefined : this.#entries[victim];
  }

  /** The coldest of those that `mayGo`; before its children only where these are in use. */
  coldestOf(mayGo: (entry: E) => boolean): E | undefined {
    const victim = this.#policy.victim(
      (index) => mayGo(this.#entries[index]!),
      (index) => !this.#options.isIdle(this.#entries[index]!),
    );
    return victim === undefined ? undefined : this.#entries[victim];
  }

  /** All of them; throws InvariantError when their order is broken. */
  checked(): E[] {
    this.#policy.checkIntegrity();
    const all = this.#entries.filter((entry) => entry !== undefined);
    invariant(this.#policy.count === all.length, 'arena: policy and entries disagree');
    for (const entry of all) {
      invariant(this.#policy.has(entry.index), 'arena: an entry is in no order');
      invariant(!this.#aside.has(entry) || !this.#options.isIdle(entry), 'arena: what nobody uses is aside');
    }
    return all;
  }

  /** A walk would else pass over all that it follows, of which a part was put aside before. */
  #refreshAbove(entry: E): void {
    const { parentOf } = this.#options;
    let left = mostAside;
    for (let above = parentOf(entry); above !== undefined && left > 0; above = parentOf(above), left--)
      if (!this.#policy.refresh(above.index)) return;
  }

  /** If they are many, with what is kept of their chains; what is too much for one turn at the next allocation. */
  #putAside(passed: readonly E[]): void {
    const { mayPass = manyPassed } = this.#options;
    const most = Math.max(mostPassed, mayPass + 1);
    const kept = new Set<E>();
    let isAll = true;
    for (let at = 0; isAll && at < passed.length; at++) isAll = this.#collect(passed[at]!, kept, most);
    if (kept.size > mayPass) this.#park(kept);
  }

  #goOnPuttingAside(): void {
    const first = this.#unfinished!;
    this.#unfinished = undefined;
    const kept = new Set<E>();
    if (this.#entries[first.index] === first) this.#collect(first, kept, mostPassed);
    this.#park(kept);
  }

  /** Into `kept`, what is in use of a chain from its end on; false: there is more than `most`. */
  #collect(end: E, kept: Set<E>, most: number): boolean {
    const { isIdle, parentOf } = this.#options;
    for (let entry: E | undefined = end; entry !== undefined; entry = parentOf(entry)) {
      if (kept.has(entry) || this.#aside.has(entry) || isIdle(entry)) break;
      if (kept.size >= most) {
        this.#unfinished = entry;
        return false;
      }
      kept.add(entry);
    }
    return true;
  }

  #park(kept: ReadonlySet<E>): void {
    for (const entry of kept) {
      this.#policy.park!(entry.index);
      this.#aside.add(entry);
    }
  }
}
