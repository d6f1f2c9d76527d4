/**
 * Lines to workers are opened and closed a few a turn: each is a client of a library, with sockets to come, and a list may bring or drop
 * a thousand workers at once.
 *
 * Invariants: what came first is done first, at once as far as the turn has room; of one worker only the last thing asked for is done, so
 * that who has left meanwhile is not opened.
 */
import type { Member } from './member.ts';

/** A tenth to a quarter of a millisecond each, and more than a whole one until it has told its load: that comes in the turns between. */
export const linesPerTurn = 8;

export class LineTurns {
  readonly #works = new Map<Member, () => void>();
  /** Of this turn. */
  #left = linesPerTurn;
  #turn: NodeJS.Immediate | undefined;

  /** In place of what else waits to be done for this member. */
  add(member: Member, work: () => void): void {
    this.#works.delete(member);
    this.#works.set(member, work);
    this.#goOn();
  }

  /** Nothing that waits is done for this member. */
  drop(member: Member): void {
    this.#works.delete(member);
  }

  /** Resolves when nothing waits any more. */
  async done(): Promise<void> {
    while (this.#works.size > 0) await new Promise<void>((resolve) => void setImmediate(resolve));
  }

  #goOn(): void {
    this.#turn ??= setImmediate(() => {
      this.#turn = undefined;
      this.#left = linesPerTurn;
      if (this.#works.size > 0) this.#goOn();
    });
    for (const [member, work] of this.#works) {
      if (this.#left === 0) return;
      this.#left--;
      this.#works.delete(member);
      work();
    }
  }
}
