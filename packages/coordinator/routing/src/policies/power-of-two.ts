/**
 * Two workers by chance, the less loaded of them (Mitzenmacher, "The power of two choices in randomized load balancing").
 * `worker = argmin over 2 random (waiting + running)`.
 */
import { eligible, type Policy, type Random, type RoutedRequest, requestsOf, type WorkerState } from '../policy.ts';

export class PowerOfTwo implements Policy {
  readonly name = 'power-of-two';

  choose(
    _request: RoutedRequest,
    workers: readonly (WorkerState | undefined)[],
    _nowMs: number,
    random: Random,
  ): number {
    const numbers = eligible(workers);
    const first = Math.floor(random() * numbers.length);
    const step = 1 + Math.floor(random() * (numbers.length - 1));
    const a = numbers[first]!;
    const b = numbers[(first + step) % numbers.length]!;
    return requestsOf(workers[b]!) < requestsOf(workers[a]!) ? b : a;
  }
}
