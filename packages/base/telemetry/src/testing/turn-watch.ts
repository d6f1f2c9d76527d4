/** What a service process says, at its end, of the turns of its event loop. */
import type { ChildProcess } from 'node:child_process';

export class TurnWatch {
  #turns: { readonly longestMs: number; readonly above50ms: number } | undefined;

  constructor(child: ChildProcess) {
    child.on('message', (message: object) => {
      if ('turns' in message) this.#turns = message.turns as { longestMs: number; above50ms: number };
    });
  }

  /** Nothing is known of one that was killed. @throws Error when one of them had more than 50 ms of CPU time */
  check(name: string): void {
    if (this.#turns === undefined || this.#turns.above50ms === 0) return;
    const { above50ms, longestMs } = this.#turns;
    throw new Error(
      `${name}: ${above50ms} turns of its event loop above 50 ms, the longest ${longestMs.toFixed(0)} ms`,
    );
  }
}
