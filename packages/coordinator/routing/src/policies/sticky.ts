/**
 * llm-d's default: stay with workers that hold most of the prompt until one elsewhere would answer much sooner.
 *
 *     sticky  = workers with matched ÷ blocks ≥ 0.8; all workers where there is none
 *     TTFT    = tokens ahead ÷ prefill rate
 *     if best TTFT of sticky − best TTFT of the others > 18,000 ms      all workers
 *     of these the one with the largest  1 − min(1, tokens ahead ÷ 4,194,304)
 */
import { eligible, leastBy, type Policy, type Random, type RoutedRequest, type WorkerState } from '../policy.ts';

const affinityThreshold = 0.8;
const maxPenaltyMs = 18_000;
const tokenThreshold = 4_194_304;

export class Sticky implements Policy {
  readonly name = 'sticky';
  readonly asksIndex = true;

  choose(
    request: RoutedRequest,
    workers: readonly (WorkerState | undefined)[],
    _nowMs: number,
    random: Random,
  ): number {
    const numbers = eligible(workers);
    const blocks = Math.max(request.keys.length / 2, 1);
    const holds = (worker: number): boolean => workers[worker]!.match.blocks / blocks >= affinityThreshold;
    const ttftMs = (worker: number): number =>
      (workers[worker]!.tokensAhead / workers[worker]!.prefillTokensPerS) * 1000;
    const sticky = numbers.filter(holds);
    const others = numbers.filter((worker) => !holds(worker));
    const leaves =
      others.length > 0 && Math.min(...sticky.map(ttftMs)) - Math.min(...others.map(ttftMs)) > maxPenaltyMs;
    return leastBy(sticky.length === 0 || leaves ? numbers : sticky, random, (worker) =>
      Math.min(1, workers[worker]!.tokensAhead / tokenThreshold),
    );
  }
}
