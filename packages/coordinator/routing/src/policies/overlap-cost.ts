/**
 * Dynamo's KV router: blocks to compute after credit for what is held, plus the blocks that the worker decodes with.
 *
 *     adjusted = max(prompt blocks − 1.0 × on the GPU − 0.75 × in host memory − 0.25 × on disk, 0)
 *     cost     = 1.0 × adjusted + decode blocks          least cost; temperature 0
 *
 * What other workers hold is credited to nobody: its credit of 0.5 is for a pool that all read, which is off by default. Of what a worker
 * itself has in a tier that others read, too, each block counts a half.
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
