/**
 * Consistent hashing with bounded loads, as KubeAI does it (Mirrokni, Thorup, Zadimoghaddam 2018): the beginning of the prompt
 * is hashed onto a ring of the workers; the first one from there on whose load is within the bound gets it.
 *
 *     accept if  total = 0  or  load + 1 ≤ (total + 1) / n × 1.25        256 points of each worker on the ring
 *     nobody within it (fewer requests than workers, uneven points): the first on the ring, where the prompt is at home
 *
 * KubeAI hashes the first 100 characters of the prompt; here it is the first block, or the session where there is one.
 */
import { hashText, mix32 } from '../hashing.ts';
import { type Policy, type RoutedRequest, requestsOf, type WorkerState } from '../policy.ts';
import { HashRing } from './hash-ring.ts';

const loadFactor = 1.25;

export class BoundedHash implements Policy {
  readonly name = 'bounded-hash';
  readonly #ring = new HashRing();

  choose(request: RoutedRequest, workers: readonly (WorkerState | undefined)[]): number {
    this.#ring.grow(workers.length);
    let total = 0;
    let count = 0;
    let least = Number.POSITIVE_INFINITY;
    for (const worker of workers) {
      if (worker === undefined) continue;
      const requests = requestsOf(worker);
      total += requests;
      least = Math.min(least, requests);
      count++;
    }
    const bound = ((total + 1) / count) * loadFactor;
    const at = request.session !== '' ? hashText(request.session) : mix32(request.keys[0] ?? 0, request.keys[1] ?? 0);
    const start = this.#ring.find(at);
    // Where nobody is within the bound, the whole ring would be gone round for it.
    const takesFirst = total === 0 || least + 1 > bound;
    for (let i = 0; i < this.#ring.length; i++) {
      const worker = this.#ring.workerAt(start + i);
      const state = workers[worker];
      if (state !== undefined && (takesFirst || requestsOf(state) + 1 <= bound)) return worker;
    }
    return 0; // nobody may be chosen
  }
}
