/**
 * What a way to serve a request costs: the targets that it makes anybody miss, and seconds by which answers come later, each second
 * weighed by how much it matters to whom it befalls.
 *
 *     between(w,n) = step(w) + min(n, chunk(w)) ÷ prefill rate                time between two tokens of those that run
 *     misses       = (waited + time to first token > target) + Σ over D, P: running, where `between` exceeds its target by this request
 *
 *     whose                          seconds                        weight
 *     the request's first token      from now to it                 how late it is by then ÷ a third of the target, at
 *                                                                   most as at the target
 *     its other tokens               the same                       0.1
 *     streams that run at D or P     what is computed there, each   0.1 where `between` stays within the target, else 1
 *     requests that wait there       half of that, each             as the first token's at its end, and its others'; 0 where others compute
 *                                                                   their prompts
 *
 * Streams that get their tokens in time are hardly harmed: a decode side takes prompts itself while prefill has a queue. That a worker
 * which runs streams takes prefill as far as their target allows is TaiChi's (arXiv 2508.01989).
 */
import type { Question, Side } from './question.ts';
import { chunkOf, stepS } from './times.ts';

/** Of a second that tokens come later, but in time. */
const inTime = 0.1;
/** Of the target: there a first token is worth a second for each that it comes later; sooner less, later more, up to its target. */
const soon = 1 / 3;

export interface Cost {
  /** Longest seconds between two tokens of those that run beside it. */
  readonly itlS: number;
  /** Streams that it makes slower than their target. */
  readonly slowed: number;
  /** These, and the request itself where its first token is late. */
  readonly misses: number;
  readonly costS: number;
}

/** Prompt tokens that are computed at a side, and how long. */
export interface Work {
  readonly side: Side;
  readonly tokens: number;
  readonly seconds: number;
}

export function costOf(question: Question, ttftS: number, work: readonly Work[]): Cost {
  const { waitedS, ttftS: targetS, itlS: betweenS } = question;
  const urgency = Math.min(waitedS + ttftS, targetS) / (targetS * soon);
  let [costS, itlS, slowed] = [ownCostOf(question, ttftS, ttftS), 0, 0];
  for (const { side, tokens, seconds } of work) {
    if (tokens === 0) continue;
    costS += (seconds * (urgency + inTime) * Math.max(side.waiting - side.awaiting, 0)) / 2;
    if (side.running === 0) continue;
    const without = stepS(side);
    const beside = without + Math.min(tokens, chunkOf(question, side)) / side.prefillTokensPerS;
    itlS = Math.max(itlS, beside);
    costS += seconds * side.running * (beside <= betweenS ? inTime : 1);
    // Those that are too slow already are not made so by this request.
    if (without <= betweenS && beside > betweenS) slowed += side.running;
  }
  return { itlS, slowed, misses: slowed + (waitedS + ttftS > targetS ? 1 : 0), costS };
}

/** Of the request itself: its first token, and the others. */
export function ownCostOf({ waitedS, ttftS: targetS }: Question, firstS: number, othersS: number): number {
  return worthS(waitedS + firstS, targetS) - worthS(waitedS, targetS) + othersS * inTime;
}

/** Of waiting so long for a first token, each moment as urgent as it is late: long waits weigh more than short ones make good. */
function worthS(waitS: number, targetS: number): number {
  const urgentS = Math.min(waitS, targetS);
  return (urgentS * urgentS) / (2 * targetS * soon) + Math.max(waitS - targetS, 0) / soon;
}
