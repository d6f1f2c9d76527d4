/** One after another. `worker = next eligible number`. */
import type { Policy, RoutedRequest, WorkerState } from '../policy.ts';

export class RoundRobin implements Policy {
  readonly name = 'round-robin';
  #next = 0;

  choose(_request: RoutedRequest, workers: readonly (WorkerState | undefined)[]): number {
    for (let i = 0; i < workers.length; i++) {
      const number = (this.#next + i) % workers.length;
      if (workers[number] === undefined) continue;
      this.#next = number + 1;
      return number;
    }
    return 0;
  }
}
