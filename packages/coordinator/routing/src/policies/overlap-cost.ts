/**
 * Dynamo's KV router: blocks to compute after credit for what is held, plus the blocks that the worker decodes with.
 *
 *     adjusted = max(prompt blocks − 1.0 × on the GPU − 0.75 × in host memory − 0.25 × on disk − 0.5 × shared, 0)
 *     cost     = 1.0 × adjusted + decode blocks          least cost; temperature 0
 *
 * Its prefill blocks are those of the requests that it has sent and that have not begun, too.
 */
import { eligible, leastBy, type Policy, type Random, type RoutedRequest, type WorkerState } from '../policy.ts';

/** By medium: GPU, host memory, disk, peer, Redis, S3. */
const credits = [1, 0.75, 0.25, 0.5, 0.5, 0.5];

export class OverlapCost implements Policy {
  readonly name = 'overlap-cost';
  readonly asksIndex = true;

  choose(
    request: RoutedRequest,
    workers: readonly (WorkerState | undefined)[],
    _nowMs: number,
    random: Random,
  ): number {
    const blocks = request.keys.length / 2;
    return leastBy(eligible(workers), random, (worker) => {
      const { match, tokensAhead, usedBlocks } = workers[worker]!;
      let credit = 0;
      for (const [medium, count] of match.byMedium.entries()) credit += (credits[medium] ?? 0) * count;
      return Math.max(blocks - credit, 0) + tokensAhead / request.blockTokens + usedBlocks;
    });
  }
}
