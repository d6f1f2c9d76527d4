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

const pointsPerWorker = 256;
const loadFactor = 1.25;

interface Point {
  readonly at: number;
  readonly worker: number;
}

export class BoundedHash implements Policy {
  readonly name = 'bounded-hash';
  #ring: Point[] = [];
  #size = 0;

  choose(request: RoutedRequest, workers: readonly (WorkerState | undefined)[]): number {
    if (workers.length !== this.#size) this.#makeRing(workers.length);
    let total = 0;
    let count = 0;
    for (const worker of workers) {
      if (worker === undefined) continue;
      total += requestsOf(worker);
      count++;
    }
    const bound = ((total + 1) / count) * loadFactor;
    const at = request.session !== '' ? hashText(request.session) : mix32(request.keys[0] ?? 0, request.keys[1] ?? 0);
    const start = this.#find(at);
    let home: number | undefined;
    for (let i = 0; i < this.#ring.length; i++) {
      const { worker } = this.#ring[(start + i) % this.#ring.length]!;
      const state = workers[worker];
      if (state === undefined) continue;
      if (total === 0 || requestsOf(state) + 1 <= bound) return worker;
      home ??= worker;
    }
    return home!;
  }

  #makeRing(workers: number): void {
    this.#size = workers;
    this.#ring = [];
    for (let worker = 0; worker < workers; worker++)
      for (let i = 0; i < pointsPerWorker; i++) this.#ring.push({ at: mix32(worker + 1, i + 1), worker });
    this.#ring.sort((a, b) => a.at - b.at);
  }

  /** The first point at or after `at`. */
  #find(at: number): number {
    let low = 0;
    let high = this.#ring.length;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (this.#ring[middle]!.at < at) low = middle + 1;
      else high = middle;
    }
    return low === this.#ring.length ? 0 : low;
  }
}
