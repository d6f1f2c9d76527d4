/**
 * SimHash (Charikar 2002): prompts that share most of their blocks have fingerprints that differ in few bits, and go to the
 * worker that has met the nearest one.
 *
 *     bit i of the fingerprint = majority of bit i over the hashes of the blocks      64 bits
 *     worker = argmin Hamming distance to the last 512 fingerprints of each, within `maxDistance`; else the least loaded
 */
import {
  eligible,
  leastBy,
  type Policy,
  type Random,
  type RoutedRequest,
  requestsOf,
  type WorkerState,
} from '../policy.ts';

const remembered = 512;
const maxDistance = 20;

/** A ring of fingerprints, two words each. */
interface Seen {
  readonly words: Int32Array;
  count: number;
}

export class SimHash implements Policy {
  readonly name = 'sim-hash';
  readonly #seen: Seen[] = [];

  choose(
    request: RoutedRequest,
    workers: readonly (WorkerState | undefined)[],
    _nowMs: number,
    random: Random,
  ): number {
    const numbers = eligible(workers);
    const print = fingerprint(request.keys);
    const distances = new Map(numbers.map((worker) => [worker, this.#distance(print, worker)]));
    const nearest = Math.min(...distances.values());
    const near = nearest <= maxDistance ? numbers.filter((worker) => distances.get(worker) === nearest) : numbers;
    return leastBy(near, random, (worker) => requestsOf(workers[worker]!));
  }

  sent(request: RoutedRequest, worker: number): void {
    let seen = this.#seen[worker];
    if (seen === undefined) {
      seen = { words: new Int32Array(2 * remembered), count: 0 };
      this.#seen[worker] = seen;
    }
    seen.words.set(fingerprint(request.keys), 2 * (seen.count++ % remembered));
  }

  left(worker: number): void {
    delete this.#seen[worker];
  }

  #distance([low, high]: readonly [number, number], worker: number): number {
    const seen = this.#seen[worker];
    let least = 65;
    for (let i = 0; seen !== undefined && i < Math.min(seen.count, remembered); i++) {
      const distance = bits(seen.words[2 * i]! ^ low) + bits(seen.words[2 * i + 1]! ^ high);
      if (distance < least) least = distance;
    }
    return least;
  }
}

/** The majority of each bit over all hashes. */
export function fingerprint(keys: Int32Array): readonly [number, number] {
  const sums = new Int32Array(64);
  for (let at = 0; at < keys.length; at += 2)
    for (let bit = 0; bit < 32; bit++) {
      sums[bit]! += (keys[at]! >>> bit) & 1;
      sums[32 + bit]! += (keys[at + 1]! >>> bit) & 1;
    }
  let low = 0;
  let high = 0;
  for (let bit = 0; bit < 32; bit++) {
    if (2 * sums[bit]! * 2 > keys.length) low |= 1 << bit;
    if (2 * sums[32 + bit]! * 2 > keys.length) high |= 1 << bit;
  }
  return [low, high];
}

function bits(word: number): number {
  let x = word - ((word >>> 1) & 0x55555555);
  x = (x & 0x33333333) + ((x >>> 2) & 0x33333333);
  return Math.imul((x + (x >>> 4)) & 0x0f0f0f0f, 0x01010101) >>> 24;
}
