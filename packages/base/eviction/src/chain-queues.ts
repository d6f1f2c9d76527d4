/**
 * What policies share that choose no entry before its children: queues, and beside each of them those of its entries that are parked. A
 * child is put next to its parent, on the colder side, where they share a queue, so that few parents are walked over.
 *
 * Invariant: what is parked is tracked, with its uses and as parent and child, and is never chosen.
 */
import { invariant } from '@kvtier/errors';
import { ChainParents } from './chain-parents.ts';
import { EntryLists, none } from './entry-lists.ts';
import type { EntryIndex, EvictionPolicy, InsertHint } from './policy.ts';

export abstract class ChainQueues implements EvictionPolicy {
  abstract readonly name: EvictionPolicy['name'];
  protected readonly lists: EntryLists;
  protected readonly links = new ChainParents();
  readonly #queues: number;

  /** Lists from 0 on are the queues; as many after them, what is parked of each. */
  constructor(name: string, queues: number) {
    this.lists = new EntryLists(name, 2 * queues);
    this.#queues = queues;
  }

  abstract insert(entry: EntryIndex, nowUs: number, hint?: InsertHint): void;
  abstract touch(entry: EntryIndex, nowUs: number): void;
  abstract victim(mayEvict: (entry: EntryIndex) => boolean): EntryIndex | undefined;
  abstract coldestFirst(): Iterable<EntryIndex>;

  get count(): number {
    return this.lists.count;
  }

  has(entry: EntryIndex): boolean {
    return this.lists.has(entry);
  }

  remove(entry: EntryIndex): void {
    this.lists.remove(entry);
    this.links.remove(entry);
  }

  park(entry: EntryIndex): void {
    const queue = this.lists.listOf(entry);
    invariant(queue < this.#queues, () => `${this.name}: entry ${entry} is parked already`);
    this.lists.move(this.#queues + queue, entry);
  }

  unpark(entry: EntryIndex): void {
    const queue = this.lists.listOf(entry) - this.#queues;
    invariant(queue >= 0, () => `${this.name}: entry ${entry} is not parked`);
    this.lists.remove(entry);
    this.enqueue(queue, entry, this.links.parentOf(entry));
  }

  checkIntegrity(): void {
    this.lists.checkIntegrity();
  }

  /** The queue that a tracked entry stands in; `none`: it is parked. */
  protected queueOf(entry: EntryIndex): number {
    const list = this.lists.listOf(entry);
    return list < this.#queues ? list : none;
  }

  /** Next to its parent if that stands there too, else as the warmest. */
  protected enqueue(queue: number, entry: EntryIndex, parent: EntryIndex | undefined): void {
    if (parent !== undefined && this.queueOf(parent) === queue) this.lists.insertColderThan(parent, entry);
    else this.lists.append(queue, entry);
  }
}
