/**
 * Consistent hashing with bounded loads, as KubeAI does it (Mirrokni, Thorup, Zadimoghaddam 2018): the beginning of the prompt
 * is hashed onto a ring of the workers; the first one from there on whose load is within the bound gets it.
 *
 *     accept if  total = 0  or  load + 1 ≤ (total + 1) / n × 1.25        256 points of each worker on the ring
 *     nobody within it (fewer requests than workers, uneven points): the first on the ring, where the prompt is at home
 *
 * KubeAI hashes the first 100 characters of the prompt; here it is the first block, or the session where there is one. Its ring is of the
 * endpoints' names, and so is this one: whoever routes by the same workers has the same one, whatever numbers they have there.
 */
import { hashText, mix32 } from '../hashing.ts';
import { type Policy, type RoutedRequest, requestsOf, type WorkerState } from '../policy.ts';
import { HashRing } from './hash-ring.ts';

const loadFactor = 1.25;

export class BoundedHash implements Policy {
  readonly name = 'bounded-hash';
  readonly #ring = new HashRing();
  readonly #names: (string | undefined)[] = [];

  named(worker: number, name: string): void {
    if (this.#names[worker] === name) return;
    this.left(worker);
    this.#names[worker] = name;
  }

  left(worker: number): void {
    this.#names[worker] = undefined;
    this.#ring.drop(worker);
  }

  choose(request: RoutedRequest, workers: readonly (WorkerState | undefined)[]): number {
    let total = 0;
    let count = 0;
    let least = Number.POSITIVE_INFINITY;
    for (let number = 0; number < workers.length; number++) {
      const worker = workers[number];
      if (worker === undefined) continue;
      if (!this.#ring.has(number)) this.#ring.add(number, this.#names[number]);
      const requests = requestsOf(worker);
      total += requests;
      least = Math.min(least, requests);
      count++;
    }
    const bound = ((total + 1) / count) * loadFactor;
    const at = request.session !== '' ? hashText(request.session) : mix32(request.keys[0] ?? 0, request.keys[1] ?? 0);
    this.#ring.settle();
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
