/**
 * production-stack's prefix-aware routing: a trie of the prompts' chunks, never pruned, without a load term; by chance among
 * those with the longest match.
 *
 *     worker = random of argmax matched(chunks)      chunks there: 128 characters; here: blocks
 */
import { eligible, leastBy, type Policy, type Random, type RoutedRequest, type WorkerState } from '../policy.ts';
import { PrefixMemory } from '../prefix-memory.ts';

/** The original has no bound; nothing of ours is without one: 2.4 million blocks. */
const maxBytes = 512 * 2 ** 20;

export class HashTrie implements Policy {
  readonly name = 'hash-trie';
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
    const matched = this.#memory.match(request.keys, numbers);
    return numbers[leastBy([...numbers.keys()], random, (i) => -matched[i]!)]!;
  }

  sent(request: RoutedRequest, worker: number): void {
    this.#memory.sent(request.keys, worker);
  }

  left(worker: number): void {
    this.#memory.left(worker);
  }
}
