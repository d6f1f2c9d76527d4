/**
 * Blocks that have come from peers, and that nobody was told of yet. What is told in a turn of its own costs a third of a millisecond a
 * block, here, at the engine that waits for it, at the peer that hears of it, and at whoever reads the events; what is told together
 * costs little more than one. So those of one read that come within `gatherMs` are told together.
 *
 *     came     ■ ■ ■ ■ ■ ■ ■ ■ ■ ■|            the read's last one: who waits for all of it waits no longer than before
 *     told           4       4   2
 *
 * Invariants: each is told once, in the order in which they came; none later than `gatherMs` after it came; the last one of a read, and one that failed,
 * in the same turn, with all before it.
 */
import { invariant } from '@kvtier/errors';

/** Blocks of 256 KiB come every 2 ms over 1 Gbit/s. */
const gatherMs = 8;
/** They are told sooner: a peer that is fast has enough to do all the same. */
const mostGathered = 16;

export class Gathering<Result> {
  readonly #tell: (tag: number, result: Result) => void;
  /** Blocks that were asked for and have not come, by their read. */
  readonly #open = new Map<object, number>();
  #came: (readonly [tag: number, result: Result])[] = [];
  #isDue = false;
  #timer: NodeJS.Timeout | undefined;

  constructor(tell: (tag: number, result: Result) => void) {
    this.#tell = tell;
  }

  asked(read: object, blocks: number): void {
    this.#open.set(read, (this.#open.get(read) ?? 0) + blocks);
  }

  /** `isGood`: it is of use, and can wait for others. */
  came(read: object, tag: number, result: Result, isGood: boolean): void {
    const open = (this.#open.get(read) ?? 0) - 1;
    invariant(open >= 0, 'peer: a block came that was not asked for');
    if (open > 0) this.#open.set(read, open);
    else this.#open.delete(read);
    this.#came.push([tag, result]);
    this.#isDue ||= open === 0 || !isGood || this.#came.length >= mostGathered;
  }

  /** What came in this turn is all here. */
  turnOver(): void {
    if (this.#isDue) this.flush();
    else if (this.#came.length > 0) this.#timer ??= setTimeout(() => this.flush(), gatherMs);
  }

  flush(): void {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    this.#isDue = false;
    const came = this.#came;
    this.#came = [];
    for (const [tag, result] of came) this.#tell(tag, result);
  }
}
