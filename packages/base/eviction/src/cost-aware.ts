/**
 * What costs least to lose goes first: the cost of computing an entry anew × how likely it is asked for again, per byte. The
 * likelihood is estimated by its uses and by how long ago they were, as in GreedyDual-Size-Frequency (Cherkasova 1998):
 *
 *     value = age + uses × cost ÷ bytes          age: the value of what was evicted last, so that old values fade
 *
 * A block deep in a long context costs more than one at its root (attention), and yet must go before it: only entries without
 * tracked children are candidates. So chains compete by their leaves, and a leaf's loss exposes its parent.
 *
 * Invariant: exactly the tracked entries without tracked children are in the heap.
 */
import { invariant } from '@kvtier/errors';
import { ChainParents } from './chain-parents.ts';
import { IndexedHeap } from './indexed-heap.ts';
import type { EntryIndex, EvictionPolicy, InsertHint } from './policy.ts';
import { copied, SpareCopies } from './spare-copies.ts';

/** Of an entry that is not tracked. */
const untracked = 0;

export class CostAwarePolicy implements EvictionPolicy {
  readonly name = 'cost-aware';
  #uses: Float64Array = new Float64Array(64);
  /** Per byte. */
  #costs: Float64Array = new Float64Array(64);
  #values: Float64Array = new Float64Array(64);
  /** When an entry got its value: of equal ones the older goes first. From 1 on. */
  #orders: Float64Array = new Float64Array(64).fill(untracked);
  #count = 0;
  readonly #links = new ChainParents();
  readonly #leaves = new IndexedHeap((a, b) => this.#before(a, b));
  readonly #copies = new SpareCopies(() => new CostAwarePolicy());
  #age = 0;
  #clock = 0;
  /** What `victim` chose last: its removal is an eviction. */
  #chosen: EntryIndex | undefined;

  get count(): number {
    return this.#count;
  }

  has(entry: EntryIndex): boolean {
    return (this.#orders[entry] ?? untracked) !== untracked;
  }

  insert(entry: EntryIndex, _nowUs: number, hint?: InsertHint): void {
    invariant(Number.isInteger(entry) && entry >= 0, () => `cost-aware: ${entry} is not an entry`);
    invariant(!this.has(entry), () => `cost-aware: entry ${entry} is tracked already`);
    const parent = hint?.parent !== undefined && this.has(hint.parent) ? hint.parent : undefined;
    this.#growTo(entry);
    this.#count++;
    this.#uses[entry] = 1;
    this.#costs[entry] = (hint?.cost ?? 1) / (hint?.bytes ?? 1);
    this.#revalue(entry);
    this.#links.add(entry, parent);
    this.#leaves.add(entry);
    if (parent !== undefined && this.#leaves.has(parent)) this.#leaves.remove(parent);
  }

  touch(entry: EntryIndex, _nowUs: number): void {
    this.#checkTracked(entry);
    const isLeaf = this.#leaves.has(entry);
    if (isLeaf) this.#leaves.remove(entry);
    this.#uses[entry]!++;
    this.#revalue(entry);
    if (isLeaf) this.#leaves.add(entry);
  }

  /** Nothing to do: what has children is no candidate, and an end that comes has a value of its own. */
  refresh(entry: EntryIndex): boolean {
    this.#checkTracked(entry);
    return false;
  }

  remove(entry: EntryIndex): void {
    this.#checkTracked(entry);
    if (entry === this.#chosen) this.#age = Math.max(this.#age, this.#values[entry]!);
    this.#chosen = undefined;
    const parent = this.#links.parentOf(entry);
    if (this.#leaves.has(entry)) this.#leaves.remove(entry);
    this.#links.remove(entry);
    this.#orders[entry] = untracked;
    this.#count--;
    if (parent !== undefined && !this.#links.hasChildren(parent)) this.#leaves.add(parent);
  }

  /** O(log n) for each candidate that may not go. */
  victim(mayEvict: (entry: EntryIndex) => boolean): EntryIndex | undefined {
    const passed: EntryIndex[] = [];
    let found = this.#leaves.first();
    while (found !== undefined && !mayEvict(found)) {
      passed.push(found);
      this.#leaves.remove(found);
      found = this.#leaves.first();
    }
    for (const entry of passed) this.#leaves.add(entry);
    this.#chosen = found;
    return found;
  }

  evict(count: number, mayEvict: (entry: EntryIndex) => boolean): EntryIndex[] {
    const passed: EntryIndex[] = [];
    const evicted: EntryIndex[] = [];
    while (evicted.length < count) {
      const first = this.#leaves.first();
      if (first === undefined) break;
      if (!mayEvict(first)) {
        passed.push(first);
        this.#leaves.remove(first);
        continue;
      }
      this.#chosen = first;
      this.remove(first);
      evicted.push(first);
    }
    for (const entry of passed) this.#leaves.add(entry);
    return evicted;
  }

  /** As if everything were evicted now, one after another, and nothing used meanwhile. */
  coldestFirst(): Iterable<EntryIndex> {
    return this.#copies.walk((copy) => {
      copy.#copyFrom(this);
      return copy.#inOrder();
    });
  }

  checkIntegrity(): void {
    this.#leaves.checkIntegrity();
    let count = 0;
    for (let entry = 0; entry < this.#orders.length; entry++) {
      if (!this.has(entry)) continue;
      count++;
      const isLeaf = this.#leaves.has(entry);
      invariant(isLeaf !== this.#links.hasChildren(entry), () => `cost-aware: entry ${entry} is a leaf or is not`);
    }
    invariant(count === this.#count, () => `cost-aware: ${count} entries, ${this.#count} counted`);
    for (const entry of this.#leaves.entries()) this.#checkTracked(entry);
  }

  #copyFrom(other: CostAwarePolicy): void {
    this.#values = copied(this.#values, other.#values);
    this.#orders = copied(this.#orders, other.#orders);
    this.#count = other.#count;
    this.#links.copyFrom(other.#links);
    this.#leaves.copyFrom(other.#leaves);
  }

  /** Of a copy, which belongs to the walk. */
  *#inOrder(): Iterable<EntryIndex> {
    for (let next = this.#leaves.first(); next !== undefined; next = this.#leaves.first()) {
      yield next;
      this.remove(next);
    }
  }

  #checkTracked(entry: EntryIndex): void {
    invariant(this.has(entry), () => `cost-aware: entry ${entry} is not tracked`);
  }

  #revalue(entry: EntryIndex): void {
    this.#values[entry] = this.#age + this.#uses[entry]! * this.#costs[entry]!;
    this.#orders[entry] = ++this.#clock;
  }

  #before(a: EntryIndex, b: EntryIndex): boolean {
    const first = this.#values[a]!;
    const second = this.#values[b]!;
    return first === second ? this.#orders[a]! < this.#orders[b]! : first < second;
  }

  #growTo(entry: EntryIndex): void {
    if (entry < this.#orders.length) return;
    const length = Math.max(entry + 1, this.#orders.length * 2);
    const grow = (from: Float64Array): Float64Array => {
      const grown = new Float64Array(length);
      grown.set(from);
      return grown;
    };
    this.#uses = grow(this.#uses);
    this.#costs = grow(this.#costs);
    this.#values = grow(this.#values);
    this.#orders = grow(this.#orders);
  }
}
