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

interface Entry {
  uses: number;
  /** Cost per byte. */
  readonly cost: number;
  value: number;
  /** When it got its value: of equal ones the older goes first. */
  order: number;
}

export class CostAwarePolicy implements EvictionPolicy {
  readonly name = 'cost-aware';
  readonly #entries = new Map<EntryIndex, Entry>();
  readonly #links = new ChainParents();
  readonly #leaves = new IndexedHeap((a, b) => this.#before(a, b));
  #age = 0;
  #clock = 0;
  /** What `victim` chose last: its removal is an eviction. */
  #chosen: EntryIndex | undefined;

  get count(): number {
    return this.#entries.size;
  }

  has(entry: EntryIndex): boolean {
    return this.#entries.has(entry);
  }

  insert(entry: EntryIndex, _nowUs: number, hint?: InsertHint): void {
    invariant(Number.isInteger(entry) && entry >= 0, () => `cost-aware: ${entry} is not an entry`);
    invariant(!this.has(entry), () => `cost-aware: entry ${entry} is tracked already`);
    const parent = hint?.parent !== undefined && this.has(hint.parent) ? hint.parent : undefined;
    const cost = (hint?.cost ?? 1) / (hint?.bytes ?? 1);
    this.#entries.set(entry, { uses: 1, cost, value: this.#age + cost, order: ++this.#clock });
    this.#links.add(entry, parent);
    this.#leaves.add(entry);
    if (parent !== undefined && this.#leaves.has(parent)) this.#leaves.remove(parent);
  }

  touch(entry: EntryIndex, _nowUs: number): void {
    const one = this.#entryOf(entry);
    const isLeaf = this.#leaves.has(entry);
    if (isLeaf) this.#leaves.remove(entry);
    one.uses++;
    one.value = this.#age + one.uses * one.cost;
    one.order = ++this.#clock;
    if (isLeaf) this.#leaves.add(entry);
  }

  remove(entry: EntryIndex): void {
    const one = this.#entryOf(entry);
    if (entry === this.#chosen) this.#age = Math.max(this.#age, one.value);
    this.#chosen = undefined;
    const parent = this.#links.parentOf(entry);
    if (this.#leaves.has(entry)) this.#leaves.remove(entry);
    this.#links.remove(entry);
    this.#entries.delete(entry);
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
  *coldestFirst(): Iterable<EntryIndex> {
    const leaves = new IndexedHeap((a, b) => this.#before(a, b));
    for (const entry of this.#leaves.entries()) leaves.add(entry);
    const children = new Map<EntryIndex, number>();
    for (const entry of this.#entries.keys()) {
      const parent = this.#links.parentOf(entry);
      if (parent !== undefined) children.set(parent, (children.get(parent) ?? 0) + 1);
    }
    for (let next = leaves.first(); next !== undefined; next = leaves.first()) {
      leaves.remove(next);
      yield next;
      const parent = this.#links.parentOf(next);
      if (parent === undefined) continue;
      const left = children.get(parent)! - 1;
      children.set(parent, left);
      if (left === 0) leaves.add(parent);
    }
  }

  checkIntegrity(): void {
    this.#leaves.checkIntegrity();
    for (const entry of this.#entries.keys()) {
      const isLeaf = this.#leaves.has(entry);
      invariant(isLeaf !== this.#links.hasChildren(entry), () => `cost-aware: entry ${entry} is a leaf or is not`);
    }
    for (const entry of this.#leaves.entries()) this.#entryOf(entry);
  }

  #entryOf(entry: EntryIndex): Entry {
    const one = this.#entries.get(entry);
    invariant(one, () => `cost-aware: entry ${entry} is not tracked`);
    return one;
  }

  #before(a: EntryIndex, b: EntryIndex): boolean {
    const first = this.#entries.get(a)!;
    const second = this.#entries.get(b)!;
    return first.value === second.value ? first.order < second.order : first.value < second.value;
  }
}
