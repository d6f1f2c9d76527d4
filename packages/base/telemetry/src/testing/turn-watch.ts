/** What a service process says, at its end, of the turns of its event loop. */
import type { ChildProcess } from 'node:child_process';
import { dearPagesMs } from '@kvtier/data-plane/testing';

const limitMs = 50;

interface Turns {
  readonly above50ms: number;
  /** Of the first 64 of them. */
  readonly first: readonly (readonly [ms: number, pages: number])[];
}

export class TurnWatch {
  #turns: Turns | undefined;

  constructor(child: ChildProcess) {
    child.on('message', (message: object) => {
      if ('turns' in message) this.#turns = message.turns as Turns;
    });
  }

  /**
   * Nothing is known of one that was killed.
   * @throws Error when one of them had more than 50 ms of CPU time; what new pages cost on this machine, and on no usual one, is taken off
   */
  check(name: string): void {
    if (this.#turns === undefined || this.#turns.above50ms === 0) return;
    const { above50ms, first } = this.#turns;
    const dearPageMs = dearPagesMs(1);
    const long = first.map(([ms, pages]) => ms - pages * dearPageMs).filter((ms) => ms > limitMs);
    const count = long.length + above50ms - first.length;
    if (count === 0) return;
    throw new Error(
      `${name}: ${count} turns of its event loop above 50 ms, the longest ${Math.max(limitMs, ...long).toFixed(0)} ms`,
    );
  }
}
