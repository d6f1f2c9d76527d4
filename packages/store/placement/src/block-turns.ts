/**
 * Work on many blocks for which nobody waits: it begins at once, as far as the turn has room, and goes on in the turns to come.
 *
 * Invariants: all of it together takes so many blocks of a turn, and more only where somebody is in need of what it gives (`take`); what
 * came first is done first. None of it touches what the store closes: what is left then goes on to its end.
 */
import type { Steps } from './steps.ts';

export class BlockTurns {
  /** With what is called when it is done. */
  readonly #works = new Map<Steps<void>, () => void>();
  readonly #blocks: number;
  /** Of this turn. */
  #left: number;
  #turn: NodeJS.Immediate | undefined;

  constructor(blocks: number) {
    this.#blocks = blocks;
    this.#left = blocks;
  }

  /** It yields after each block. Somebody else may take it further, too. */
  add(work: Steps<void>, onDone: () => void): void {
    this.#works.set(work, onDone);
    this.#goOn();
  }

  /**
   * So many blocks of it now, for somebody who would be refused what it is about to give. False: there is nothing left to do. What is
   * done now is not done again in what is left of the turn.
   */
  take(count: number): boolean {
    const before = this.#left;
    this.#left = count;
    this.#work();
    const done = count - this.#left;
    this.#left = Math.max(0, before - done);
    return done > 0;
  }

  #goOn(): void {
    this.#turn ??= setImmediate(() => {
      this.#turn = undefined;
      this.#left = this.#blocks;
      if (this.#works.size > 0) this.#goOn();
    });
    this.#work();
  }

  /** As far as there is room. */
  #work(): void {
    for (const [work, onDone] of this.#works) {
      while (this.#left > 0) {
        if (work.next().done) {
          this.#works.delete(work);
          onDone();
          break;
        }
        this.#left--;
      }
      if (this.#left === 0) return;
    }
  }
}
