/**
 * Our own: the worker on which the request, and those that come after it, are served soonest.
 *
 *     compute = uncached tokens ÷ prefill rate                 bring = Σ over media: blocks there ÷ blocks a second from it
 *     ahead   = max(tokens ahead ÷ prefill rate, loads ahead)
 *     room    = blocks that are missing until it fits, with those that wait before it ÷ blocks that are freed a second
 *     cost    = max(ahead, room) + (compute + bring) × (1 + queued ÷ 2)
 *
 * A worker's rates are those that it measures while it decodes what it decodes. The factor is what the request costs others: work
 * that this choice adds, and another would not, is waited for by all that come while there is a queue; `queued` is how many
 * requests wait per worker in the cluster. Without a queue the rule is the least predicted time to first token (as Mooncake's
 * algorithm 1); the longer the queues, the more it saves work, which is what decides throughput at saturation.
 */
import { eligible, leastBy, type Policy, type Random, type RoutedRequest, type WorkerState } from '../policy.ts';

export class Predicted implements Policy {
  readonly name = 'predicted';

  choose(
    request: RoutedRequest,
    workers: readonly (WorkerState | undefined)[],
    _nowMs: number,
    random: Random,
  ): number {
    const numbers = eligible(workers);
    let waiting = 0;
    for (const worker of numbers) waiting += workers[worker]!.waiting;
    const weight = 1 + waiting / numbers.length / 2;
    return leastBy(numbers, random, (worker) => costOf(request, workers[worker]!, 0, weight));
  }
}

/** Seconds: until the worker has served what is before the request, and what the request costs. `claimedS`: of others that wait. */
export function costOf(request: RoutedRequest, worker: WorkerState, claimedS: number, weight: number): number {
  return Math.max(aheadS(worker) + claimedS, roomS(request, worker)) + workS(request, worker) * weight;
}

/** Seconds of work that the worker has. */
export const aheadS = ({ tokensAhead, prefillTokensPerS, loadAheadS }: WorkerState): number =>
  Math.max(tokensAhead / prefillTokensPerS, loadAheadS);

/** Seconds of work that the request is on this worker: what it brings in, and what it computes. */
export function workS(request: RoutedRequest, worker: WorkerState): number {
  const { match, prefillTokensPerS, loadBlocksPerS, remoteBlocks, remoteMedium } = worker;
  const computeS = request.blockTokens / prefillTokensPerS;
  let bring = 0;
  for (let medium = 1; medium < match.byMedium.length; medium++)
    bring += match.byMedium[medium]! * Math.min(secondsOf(loadBlocksPerS[medium]), computeS);
  let uncached = request.tokens - match.blocks * request.blockTokens;
  if (remoteBlocks > 0 && secondsOf(loadBlocksPerS[remoteMedium]) < computeS) {
    bring += remoteBlocks * secondsOf(loadBlocksPerS[remoteMedium]);
    uncached -= remoteBlocks * request.blockTokens;
  }
  return Math.max(uncached, 1) / prefillTokensPerS + bring;
}

/** Seconds until the worker's pool has room for the request. */
export function roomS(
  request: RoutedRequest,
  { usedBlocks, waitingBlocks, totalBlocks, freedBlocksPerS, match }: WorkerState,
): number {
  const blocks = Math.ceil((request.tokens + request.maxTokens) / request.blockTokens) - match.byMedium[0]!;
  const missing = usedBlocks + waitingBlocks + blocks - totalBlocks;
  return missing <= 0 || freedBlocksPerS <= 0 ? 0 : missing / freedBlocksPerS;
}

const secondsOf = (blocksPerS: number | undefined): number =>
  blocksPerS !== undefined && blocksPerS > 0 ? 1 / blocksPerS : Number.POSITIVE_INFINITY;
