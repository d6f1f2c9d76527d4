/**
 * First in, first out: a touch changes nothing. A child stands before its parent, so that chains shrink from their tail. What was parked
 * comes back in another place: once an owner parks entries, none is chosen before its children.
 */
import { invariant } from '@kvtier/errors';
import { ChainQueues } from './chain-queues.ts';
import { firstOf } from './first-of.ts';
import type { EntryIndex, InsertHint } from './policy.ts';

const queue = 0;

export class FifoPolicy extends ChainQueues {
  readonly name = 'fifo';
  #parks = false;

  constructor() {
    super('fifo', 1);
  }

  insert(entry: EntryIndex, _nowUs: number, hint?: InsertHint): void {
    const parent = hint?.parent !== undefined && this.has(hint.parent) ? hint.parent : undefined;
    this.enqueue(queue, entry, parent);
    this.links.add(entry, parent);
  }

  touch(entry: EntryIndex, _nowUs: number): void {
    invariant(this.has(entry), () => `fifo: entry ${entry} is not tracked`);
  }

  override park(entry: EntryIndex): void {
    super.park(entry);
    this.#parks = true;
  }

  victim(mayEvict: (entry: EntryIndex) => boolean): EntryIndex | undefined {
    return firstOf(this.lists, queue, (entry) => !(this.#parks && this.links.hasChildren(entry)) && mayEvict(entry));
  }

  /** As if everything were evicted now: what was passed over for its children goes as soon as the last of these has gone. */
  *coldestFirst(): Iterable<EntryIndex> {
    const left = new Map<EntryIndex, number>();
    const childrenOf = (entry: EntryIndex): number => left.get(entry) ?? this.links.childCountOf(entry);
    const passed = new Set<EntryIndex>();
    for (const entry of this.lists.entriesOf(queue)) {
      if (childrenOf(entry) > 0) {
        passed.add(entry);
        continue;
      }
      yield entry;
      for (let above = this.links.parentOf(entry); above !== undefined; above = this.links.parentOf(above)) {
        left.set(above, childrenOf(above) - 1);
        if (left.get(above)! > 0 || !passed.has(above)) break;
        yield above;
      }
    }
  }
}
