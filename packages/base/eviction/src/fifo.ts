/**
 * First in, first out: a touch changes nothing. A child stands before its parent, so that chains shrink from their tail; what was parked
 * comes back in another place, so that children are looked for all the same.
 */
import { invariant } from '@kvtier/errors';
import { ChainQueues, parentsPassed } from './chain-queues.ts';
import type { EntryIndex, InsertHint } from './policy.ts';

const queue = 0;

export class FifoPolicy extends ChainQueues {
  readonly name = 'fifo';

  constructor(mayPass = parentsPassed) {
    super('fifo', 1, mayPass);
  }

  insert(entry: EntryIndex, _nowUs: number, hint?: InsertHint): void {
    const parent = hint?.parent !== undefined && this.has(hint.parent) ? hint.parent : undefined;
    this.track(queue, entry, parent, hint?.comesLate);
  }

  touch(entry: EntryIndex, _nowUs: number): void {
    invariant(this.has(entry), () => `fifo: entry ${entry} is not tracked`);
  }

  protected choose(mayGo: (entry: EntryIndex) => boolean): EntryIndex | undefined {
    return this.walk(queue, (entry) => (mayGo(entry) ? 'chosen' : 'stays'));
  }

  protected empty(): FifoPolicy {
    return new FifoPolicy(this.mayPass);
  }

  /** Where all stand in the queue, without taking them out: what was passed over for its children goes as soon as their last has gone. */
  protected override *inOrder(): Iterable<EntryIndex> {
    if (this.lists.countOf(queue) < this.count) {
      yield* super.inOrder();
      return;
    }
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
