/**
 * What policies share that choose no entry before its children: queues, and beside each of them what cannot be chosen from it. A child is
 * put next to its parent, on the colder side, where they share a queue, so that few parents are walked over.
 *
 *     queue ──park──▶ parked ──unpark──▶ queue, as if it had just come
 *       └──passed over for its children, among many, or refreshed──▶ behind ──all that follows is parked──▶ edge
 *     the coldest of its queue ◀──the last child goes──────┴──────────────────────────────┘
 *
 * Where nothing childless may go, an entry goes before its children if none of these may: what a few kept ends of chains stand on must
 * not stay for their sake. Once it is gone, what stood before it is childless. So many kept ones are looked at for that, no more: whoever
 * keeps more than these parks them, and finds the others later.
 *
 * Invariants: what is parked is tracked, with its uses and as parent and child, and is never chosen; all that follows what is on an edge
 * is parked, and something that follows what is behind is not. Walks are bounded: few parents keep their place in a queue, and each of the
 * others comes back once, when its last child goes.
 */
import { invariant } from '@kvtier/errors';
import { ChainParents } from './chain-parents.ts';
import { EntryLists, none } from './entry-lists.ts';
import type { EntryIndex, EvictionPolicy, InsertHint } from './policy.ts';
import { SpareCopies } from './spare-copies.ts';

/** So many parents that a walk passes over keep their place: in most orders there are fewer. */
export const parentsPassed = 64;

/** So many that may not go are remembered, to look at what stands before them: some milliseconds. */
export const mostKept = 4096;

/** Which lists, of each queue: list `kind × queues + queue`. */
const kinds = { queue: 0, parked: 1, behind: 2, edge: 3 };
const kindCount = Object.keys(kinds).length;

/** Of `exposed`: more than one. */
const several = -2;

/**
 * What a walk has done with an entry; 'moved': to where the walk comes to it again, or into another queue; 'left': nothing, and it is to
 * end here.
 */
export type Looked = 'chosen' | 'stays' | 'moved' | 'left';

export abstract class ChainQueues implements EvictionPolicy {
  abstract readonly name: EvictionPolicy['name'];
  protected readonly lists: EntryLists;
  protected readonly links = new ChainParents();
  protected readonly mayPass: number;
  readonly #copies = new SpareCopies(() => this.empty());
  readonly #queues: number;
  /** Of the walk that goes on: parents that keep their place, and entries in use that nothing follows but such, up to `mostKept`. */
  readonly #passed = new Set<EntryIndex>();
  readonly #kept = new Set<EntryIndex>();
  /** Of each queue: it and all that is colder has been passed over, or `none`. */
  readonly #last: Int32Array;
  /** Of these, one that has lost its last child since, and may go now: it, or `several`, or `none`. */
  readonly #exposed: Int32Array;

  /** Lists from 0 on are the queues. `mayPass`: so many parents keep their place. */
  constructor(name: string, queues: number, mayPass: number) {
    this.lists = new EntryLists(name, kindCount * queues);
    this.#queues = queues;
    this.#last = new Int32Array(queues).fill(none);
    this.#exposed = new Int32Array(queues).fill(none);
    this.mayPass = mayPass;
  }

  abstract insert(entry: EntryIndex, nowUs: number, hint?: InsertHint): void;
  abstract touch(entry: EntryIndex, nowUs: number): void;
  /** The first in the policy's order that `mayGo`, which it asks about each entry that it walks over. */
  protected abstract choose(mayGo: (entry: EntryIndex) => boolean): EntryIndex | undefined;
  /** An empty one of the same bounds. */
  protected abstract empty(): ChainQueues;

  get count(): number {
    return this.lists.count;
  }

  has(entry: EntryIndex): boolean {
    return this.lists.has(entry);
  }

  /** What has children is put aside, as a walk would when it comes there. */
  refresh(entry: EntryIndex): boolean {
    const isNew = this.queueOf(entry) !== none && this.links.hasChildren(entry);
    if (isNew) this.#moveTo(this.#asideKindOf(entry), entry);
    return isNew;
  }

  remove(entry: EntryIndex): void {
    this.#leave(entry);
    this.#passed.delete(entry);
    this.lists.remove(entry);
    this.#place(this.links.remove(entry));
  }

  park(entry: EntryIndex): void {
    invariant(this.#kindOf(entry) !== kinds.parked, () => `${this.name}: entry ${entry} is parked already`);
    this.#moveTo(kinds.parked, entry);
    this.#place(this.links.park(entry));
  }

  unpark(entry: EntryIndex): void {
    invariant(this.#kindOf(entry) === kinds.parked, () => `${this.name}: entry ${entry} is not parked`);
    const queue = this.homeOf(entry);
    this.lists.remove(entry);
    this.enqueue(queue, entry, this.links.parentOf(entry));
    this.#place(this.links.unpark(entry));
  }

  victim(
    mayEvict: (entry: EntryIndex) => boolean,
    isInUse: (entry: EntryIndex) => boolean = () => true,
  ): EntryIndex | undefined {
    return this.next(this.#begin(mayEvict, isInUse));
  }

  evict(count: number, mayEvict: (entry: EntryIndex) => boolean): EntryIndex[] {
    const mayGo = this.#begin(mayEvict, () => true);
    const evicted: EntryIndex[] = [];
    while (evicted.length < count) {
      const found = this.next(mayGo);
      if (found === undefined) break;
      this.remove(found);
      evicted.push(found);
    }
    return evicted;
  }

  /** As if everything were evicted now, one after another, and nothing used meanwhile. */
  coldestFirst(): Iterable<EntryIndex> {
    return this.#copies.walk((copy) => {
      copy.copyFrom(this);
      return copy.inOrder();
    });
  }

  checkIntegrity(): void {
    this.lists.checkIntegrity();
    for (let queue = 0; queue < this.#queues; queue++) {
      for (const kind of [kinds.behind, kinds.edge]) {
        for (const entry of this.lists.entriesOf(kind * this.#queues + queue)) {
          invariant(this.#asideKindOf(entry) === kind, () => `${this.name}: entry ${entry} is not where it has to be`);
        }
      }
    }
  }

  /** Of a copy, which belongs to the walk. */
  protected *inOrder(): Iterable<EntryIndex> {
    const mayGo = this.#begin(
      () => true,
      () => true,
    );
    for (let next = this.next(mayGo); next !== undefined; next = this.next(mayGo)) {
      yield next;
      this.remove(next);
    }
  }

  /** The one to go next, from where the walk stands. */
  protected next(mayGo: (entry: EntryIndex) => boolean): EntryIndex | undefined {
    return this.choose((entry) => this.#isLast(entry) && mayGo(entry)) ?? this.#beforeChildren(mayGo);
  }

  /**
   * From the coldest of a queue that has not been passed over yet to the one that is chosen. `look` may take its entry out; the first one
   * it may not leave.
   */
  protected walk(queue: number, look: (entry: EntryIndex) => Looked): EntryIndex | undefined {
    const exposed = this.#exposed[queue]!;
    this.#exposed[queue] = none;
    // Which of several is colder is not known: all are walked over again.
    if (exposed === several) this.#last[queue] = none;
    else if (exposed !== none && this.#last[queue] !== none) {
      if (exposed === this.#last[queue]) this.#leave(exposed);
      else if (look(exposed) === 'chosen') return exposed;
    }
    for (;;) {
      const last = this.#last[queue]!;
      const entry = last === none ? this.lists.coldest(queue) : this.lists.warmer(last);
      if (entry === none) return undefined;
      const looked = look(entry);
      if (looked === 'chosen') return entry;
      if (looked === 'left') return undefined;
      if (looked === 'stays' && this.lists.listOf(entry) === queue) this.#last[queue] = entry;
    }
  }

  /** The queue that a tracked entry stands in, or is to come back to. */
  protected homeOf(entry: EntryIndex): number {
    return this.lists.listOf(entry) % this.#queues;
  }

  /** The queue that a tracked entry stands in; `none`: it is in none now. */
  protected queueOf(entry: EntryIndex): number {
    const list = this.lists.listOf(entry);
    return list < this.#queues ? list : none;
  }

  /** A new entry comes into this queue; `parent`: tracked, or undefined; `comesLate`: as of `InsertHint`. */
  protected track(queue: number, entry: EntryIndex, parent: EntryIndex | undefined, comesLate = false): void {
    this.enqueue(queue, entry, comesLate ? undefined : parent);
    this.#place(this.links.add(entry, parent));
  }

  /** Next to its parent if that stands there too, else as the warmest. */
  protected enqueue(queue: number, entry: EntryIndex, parent: EntryIndex | undefined): void {
    if (parent !== undefined && this.queueOf(parent) === queue) this.lists.insertColderThan(parent, entry);
    else this.lists.append(queue, entry);
  }

  /** Becomes one that will choose the same as the other, outside a walk. */
  protected copyFrom(other: ChainQueues): void {
    this.lists.copyFrom(other.lists);
    this.links.copyFrom(other.links);
  }

  /** A walk begins. Returns whether an entry that nothing follows may go. */
  #begin(
    mayEvict: (entry: EntryIndex) => boolean,
    isInUse: (entry: EntryIndex) => boolean,
  ): (entry: EntryIndex) => boolean {
    this.#passed.clear();
    this.#kept.clear();
    this.#last.fill(none);
    this.#exposed.fill(none);
    return (entry) => {
      if (mayEvict(entry)) return true;
      if (this.#kept.size < mostKept && isInUse(entry)) this.#kept.add(entry);
      return false;
    };
  }

  /** It leaves its place: the walk stands at the one before it. */
  #leave(entry: EntryIndex): void {
    const queue = this.homeOf(entry);
    if (this.#last[queue] === entry) this.#last[queue] = this.lists.colder(entry);
  }

  /** The walk has passed over it, and it has no children any more. */
  #expose(entry: EntryIndex): void {
    const queue = this.homeOf(entry);
    this.#exposed[queue] = this.#exposed[queue] === none ? entry : several;
  }

  /** Nothing follows it. */
  #isLast(entry: EntryIndex): boolean {
    const isLast = !this.links.hasChildren(entry);
    if (!isLast) this.#pass(entry);
    return isLast;
  }

  #pass(parent: EntryIndex): void {
    if (this.#passed.size < this.mayPass) this.#passed.add(parent);
    else if (!this.#passed.has(parent)) this.#moveTo(this.#asideKindOf(parent), parent);
  }

  /** Nothing childless may go: one that may, though it has children, as none of them may, nor what follows these. */
  #beforeChildren(mayGo: (entry: EntryIndex) => boolean): EntryIndex | undefined {
    for (const entry of this.#onEdges()) if (mayGo(entry)) return entry;
    const keptChildren = new Map<EntryIndex, number>();
    for (const entry of this.#kept) {
      const above = this.links.parentOf(entry);
      if (above === undefined) continue;
      const count = (keptChildren.get(above) ?? this.links.keptChildCountOf(above)) + 1;
      keptChildren.set(above, count);
      if (count < this.links.childCountOf(above)) continue;
      // If it stays, its own parent is looked at, too. (What is parked, and followed by kept ones only by now, counts with those.)
      if (this.#kindOf(above) !== kinds.parked) {
        if (mayGo(above)) return above;
      } else if (this.#kept.size < mostKept) this.#kept.add(above);
    }
    return undefined;
  }

  *#onEdges(): Iterable<EntryIndex> {
    for (const entry of this.#passed) if (this.#asideKindOf(entry) === kinds.edge) yield entry;
    for (let queue = 0; queue < this.#queues; queue++) {
      yield* this.lists.entriesOf(kinds.edge * this.#queues + queue);
    }
  }

  /** The children of this entry have changed: if it stands in no queue, where is it to be now? */
  #place(entry: EntryIndex | undefined): void {
    if (entry === undefined) return;
    const kind = this.#kindOf(entry);
    if (kind !== kinds.behind && kind !== kinds.edge) {
      if (!this.links.hasChildren(entry) && this.#passed.delete(entry)) this.#expose(entry);
      return;
    }
    if (this.links.hasChildren(entry)) {
      if (this.#asideKindOf(entry) !== kind) this.#moveTo(this.#asideKindOf(entry), entry);
      return;
    }
    // Whatever stands in the queue was warmer when this one was passed over.
    const queue = this.homeOf(entry);
    const coldest = this.lists.coldest(queue);
    this.lists.remove(entry);
    if (coldest === none) this.lists.append(queue, entry);
    else this.lists.insertColderThan(coldest, entry);
    this.#expose(entry);
  }

  #kindOf(entry: EntryIndex): number {
    return Math.floor(this.lists.listOf(entry) / this.#queues);
  }

  /** It has children. */
  #asideKindOf(entry: EntryIndex): number {
    return this.links.keptChildCountOf(entry) < this.links.childCountOf(entry) ? kinds.behind : kinds.edge;
  }

  #moveTo(kind: number, entry: EntryIndex): void {
    this.#leave(entry);
    this.lists.move(kind * this.#queues + this.homeOf(entry), entry);
  }
}
