/**
 * The endpoint picker's scorers over an approximate index: what was sent to each worker, the last 31,250 blocks of each.
 *
 *     score = 3 × matched ÷ blocks + 2 × (1 − share of the KV pool in use) + 2 × (max queue − queue) ÷ (max − min queue)
 */
import { eligible, leastBy, type Policy, type Random, type RoutedRequest, type WorkerState } from '../policy.ts';
import { PrefixMemory } from '../prefix-memory.ts';

const weights = { prefix: 3, pool: 2, queue: 2 };
const maxBytes = 512 * 2 ** 20;
const maxBlocks = 31_250;

export class Scored implements Policy {
  readonly name = 'scored';
  readonly #memory = new PrefixMemory({ maxBytes, maxBlocksPerWorker: maxBlocks });

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
    const matched = this.#memory.match(request.keys, numbers);
    const queues = numbers.map((worker) => workers[worker]!.waiting);
    const most = Math.max(...queues);
    const least = Math.min(...queues);
    const blocks = Math.max(request.keys.length / 2, 1);
    const score = (i: number): number => {
      const { usedBlocks, totalBlocks } = workers[numbers[i]!]!;
      // A pod may not tell how many it has.
      const free = totalBlocks > 0 ? 1 - usedBlocks / totalBlocks : 1;
      const queue = most === least ? 1 : (most - queues[i]!) / (most - least);
      return weights.prefix * (matched[i]! / blocks) + weights.pool * free + weights.queue * queue;
    };
    return numbers[leastBy([...numbers.keys()], random, (i) => -score(i))]!;
  }

  sent(request: RoutedRequest, worker: number): void {
    this.#memory.sent(request.keys, worker);
  }

  left(worker: number): void {
    this.#memory.left(worker);
  }
}
