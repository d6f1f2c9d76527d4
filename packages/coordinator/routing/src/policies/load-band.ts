/**
 * AIBrix's prefix-cache routing: the longest match among workers whose load is not far above the mean.
 *
 *     if max − min > 8        least requests
 *     else                    by matched ÷ blocks, then by load; the first with requests ≤ mean + 1 × σ
 *
 * One table for all workers: 200,000 blocks, whoever got them, and none that was not sent for 20 minutes. (Its blocks are of 4 characters;
 * these are the engines', of many more.)
 */
import { BlockTable } from '../block-table.ts';
import {
  eligible,
  leastBy,
  type Policy,
  type Random,
  type RoutedRequest,
  requestsOf,
  type WorkerState,
} from '../policy.ts';

const imbalance = 8;
const deviations = 1;
const maxBytes = 512 * 2 ** 20;
const ttlMs = 20 * 60_000;
const maxBlocks = 200_000;

export class LoadBand implements Policy {
  readonly name = 'load-band';
  readonly #table = new BlockTable({ maxBlocks, maxBytes, ttlMs });

  get bytes(): number {
    return this.#table.bytes;
  }

  choose(
    request: RoutedRequest,
    workers: readonly (WorkerState | undefined)[],
    _nowMs: number,
    random: Random,
  ): number {
    const numbers = eligible(workers);
    const load = (worker: number): number => requestsOf(workers[worker]!);
    const loads = numbers.map(load);
    if (Math.max(...loads) - Math.min(...loads) > imbalance) return leastBy(numbers, random, load);
    const mean = loads.reduce((sum, l) => sum + l, 0) / loads.length;
    const variance = loads.reduce((sum, l) => sum + (l - mean) ** 2, 0) / loads.length;
    const bound = mean + deviations * Math.sqrt(variance);
    const matched = this.#table.match(request.keys, numbers);
    const order = [...numbers.keys()].sort((a, b) => matched[b]! - matched[a]! || loads[a]! - loads[b]!);
    const first = order.find((i) => matched[i]! > 0 && loads[i]! <= bound);
    return first === undefined ? leastBy(numbers, random, load) : numbers[first]!;
  }

  sent(request: RoutedRequest, worker: number, nowMs: number): void {
    this.#table.sent(request.keys, worker, nowMs);
  }

  left(worker: number): void {
    this.#table.left(worker);
  }
}
