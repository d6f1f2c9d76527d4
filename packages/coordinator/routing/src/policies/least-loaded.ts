/** `argmin (waiting + running)`; of several, by chance. */
import {
  eligible,
  leastBy,
  type Policy,
  type Random,
  type RoutedRequest,
  requestsOf,
  type WorkerState,
} from '../policy.ts';

export class LeastLoaded implements Policy {
  readonly name = 'least-loaded';

  choose(
    _request: RoutedRequest,
    workers: readonly (WorkerState | undefined)[],
    _nowMs: number,
    random: Random,
  ): number {
    return leastBy(eligible(workers), random, (worker) => requestsOf(workers[worker]!));
  }
}
