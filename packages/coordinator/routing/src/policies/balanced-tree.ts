/**
 * SGLang's cache-aware routing: a radix tree of what was sent where, as long as the load is balanced.
 *
 *     if max − min > 64 and max > 1.5 × min       least loaded
 *     else if matched ÷ blocks > 0.3              longest match
 *     else                                        the one with the smallest tree
 *
 * Nothing is forgotten for its age: every 120 s its trees are cut to `max_tree_size` of each worker, the least recently used leaves first,
 * and what fits stays. That size is 67,108,864 characters of text, of newer ones tokens; here they are tokens, and a worker's tree is cut as
 * soon as it is larger. Besides, all trees together have their bound in bytes, at 2.4 million blocks.
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
import { PrefixMemory } from '../prefix-memory.ts';

const absThreshold = 64;
const relThreshold = 1.5;
const matchThreshold = 0.3;
const maxBytes = 512 * 2 ** 20;
const maxTreeTokens = 67_108_864;

export class BalancedTree implements Policy {
  readonly name = 'balanced-tree';
  readonly #memory = new PrefixMemory({ maxBytes, maxBlocksPerWorker: Number.POSITIVE_INFINITY });

  get bytes(): number {
    return this.#memory.bytes;
  }

  choose(
    request: RoutedRequest,
    workers: readonly (WorkerState | undefined)[],
    _nowMs: number,
    random: Random,
  ): number {
    const numbers = eligible(workers);
    const loads = numbers.map((worker) => requestsOf(workers[worker]!));
    const most = Math.max(...loads);
    const least = Math.min(...loads);
    if (most - least > absThreshold && most > relThreshold * least)
      return leastBy(numbers, random, (worker) => requestsOf(workers[worker]!));
    const matched = this.#memory.match(request.keys, numbers);
    const longest = Math.max(...matched);
    if (longest > matchThreshold * (request.keys.length / 2))
      return leastBy(
        numbers.filter((_, i) => matched[i] === longest),
        random,
        (worker) => requestsOf(workers[worker]!),
      );
    return leastBy(numbers, random, (worker) => this.#memory.size(worker));
  }

  sent(request: RoutedRequest, worker: number): void {
    this.#memory.sent(request.keys, worker, Math.floor(maxTreeTokens / request.blockTokens));
  }

  left(worker: number): void {
    this.#memory.left(worker);
  }
}
