/**
 * Our own: the worker on which the request, and those that come after it, are served soonest.
 *
 *     compute = uncached tokens ÷ prefill rate                 bring = Σ over media: blocks there ÷ blocks a second from it
 *     room    = what is missing until it fits, blocks and a place among those that run ÷ what is freed a second
 *     ready   = max(loads ahead + bring, room)
 *     rest    = of the step that runs: what it takes, with its prompt tokens, less the time that it has run; half a step, not known
 *     done    = rest + max(max(tokens behind that step ÷ prefill rate, ready) + compute, ready + a step)
 *     beside  = steps until its first token × requests there × what a request adds to a step
 *     cost    = done + beside + (compute + bring) × queued ÷ 2
 *
 * Blocks are brought in while others compute: at first, waiting hides it. The last term is what the request costs others: work
 * that this choice adds, and another would not, is waited for by all that come while there is a queue; `queued` is how many
 * requests wait per worker in the cluster. Without a queue the rule is the least predicted time to first token (as Mooncake's
 * algorithm 1); the longer the queues, the more it saves work, which is what decides throughput at saturation.
 *
 * Where the holders have work, an idle worker is sooner, and what it computes or brings in is held there too from then on. What is asked
 * for so often that this would come too late is copied ahead (`copies/`).
 */
import type { Policy, Random, RoutedRequest, WorkerState } from '../policy.ts';

/** What a worker holds of a prompt, and what can be brought to it. */
export interface HeldOfPrompt extends Pick<WorkerState, 'match' | 'remoteBlocks' | 'remoteMedium'> {
  /** Of the first blocks, so many are used by requests that are there; undefined: none, or nobody knows. */
  readonly inUseBlocks?: number | undefined;
}

/** Nothing was freed yet: as if what is in use were freed within so many seconds. */
const unknownAnswerS = 20;

const none = -1;
/** Of two sums of the same numbers one may be so much larger. */
export const almostOne = 1 + 1e-9;

/** Prompt tokens of one step at most, of engines that do not say it: as they are set up. */
export const usualStepTokens = 2048;

export class Predicted implements Policy {
  readonly name = 'predicted';
  readonly asksIndex = true;

  choose(
    request: RoutedRequest,
    workers: readonly (WorkerState | undefined)[],
    _nowMs: number,
    random: Random,
  ): number {
    let count = 0;
    let waiting = 0;
    for (let i = 0; i < workers.length; i++) {
      const worker = workers[i];
      if (worker === undefined) continue;
      count++;
      waiting += worker.waiting;
    }
    const weight = 1 + waiting / count / 2;
    let best = none;
    let least = Number.POSITIVE_INFINITY;
    let ties = 0;
    for (let i = 0; i < workers.length; i++) {
      const worker = workers[i];
      if (worker === undefined) continue;
      if (best === none) best = i;
      const { tokensAhead, stepTokens = 0, prefillTokensPerS, match, remoteBlocks } = worker;
      const computed = Math.max(request.tokens - (match.blocks + remoteBlocks) * request.blockTokens, 1);
      // It costs no less than what is ahead there and what it would compute: that alone tells most from the best one.
      if (tokensAhead - stepTokens + computed * weight > least * prefillTokensPerS * almostOne) continue;
      const cost = costOf(request, worker, 0, 0, weight);
      if (cost < least) {
        best = i;
        least = cost;
        ties = 1;
      } else if (cost === least && random() * ++ties < 1) best = i;
    }
    return best;
  }
}

// What follows is asked of every worker for every request: plain numbers, so that a decision leaves nothing to be collected.

/**
 * Seconds: until the worker has served what is before the request, and what the request costs. `claimedS`, `claimedLoadS`: what others that
 * wait compute and bring in there.
 */
export function costOf(
  request: RoutedRequest,
  worker: WorkerState,
  claimedS: number,
  claimedLoadS: number,
  weight: number,
  held: HeldOfPrompt = worker,
): number {
  const { waiting, running, stepS, stepPerRequestS, prefillTokensPerS, tokensAhead, loadAheadS } = worker;
  const bringS = bringSecondsOf(request, worker, held);
  const computeS = computedTokensOf(request, worker, held) / prefillTokensPerS;
  const requests = waiting + running;
  const queuedS = (tokensAhead - (worker.stepTokens ?? 0)) / prefillTokensPerS + claimedS;
  const readyS = Math.max(loadAheadS + claimedLoadS + bringS, roomS(request, worker, held));
  // Prompts of one step take no less than a step does.
  const computedS = Math.max(Math.max(queuedS, readyS) + computeS, readyS + stepS);
  const steps = 1 + (computedS * prefillTokensPerS) / (worker.maxStepTokens ?? usualStepTokens);
  return restOfStepS(worker) + computedS + steps * requests * stepPerRequestS + (computeS + bringS) * (weight - 1);
}

/** Of `costOf`, what is the same for all requests: what is left of the step that runs, and what those beside it add to one step. */
export const costBeforeS = (worker: WorkerState): number =>
  restOfStepS(worker) + (worker.waiting + worker.running) * worker.stepPerRequestS;

/** Of its pool, what is in use or is waited for: 0 to 1. Of a worker that has nothing to do, whatever it says: 0. */
export const fillOf = ({ waiting, running, usedBlocks, waitingBlocks, totalBlocks }: WorkerState): number =>
  waiting + running === 0 || totalBlocks === 0 ? 0 : Math.min((usedBlocks + waitingBlocks) / totalBlocks, 1);

/** Seconds until the step that runs ends. */
function restOfStepS(worker: WorkerState): number {
  const { stepS, stepTokens = 0, stepForS } = worker;
  const requests = worker.waiting + worker.running;
  if (requests === 0) return 0;
  const besideS = requests * worker.stepPerRequestS;
  if (stepTokens > 0)
    return Math.max(Math.max(stepS, stepTokens / worker.prefillTokensPerS) + besideS - (stepForS ?? 0), 0);
  const tokenS = stepS + worker.running * worker.stepPerRequestS;
  // Nobody told when it began: half of it, on average. Who has not measured its steps does not say how long they are.
  if (stepForS === undefined || tokenS === 0) return tokenS / 2;
  return (Math.floor(stepForS / tokenS) + 1) * tokenS - stepForS;
}

/** Seconds that the worker has to compute. */
export const computeAheadS = ({ tokensAhead, prefillTokensPerS }: WorkerState): number =>
  tokensAhead / prefillTokensPerS;

/** Seconds of work that the request is on this worker. */
export const workS = (request: RoutedRequest, worker: WorkerState, held: HeldOfPrompt = worker): number =>
  computedTokensOf(request, worker, held) / worker.prefillTokensPerS + bringSecondsOf(request, worker, held);

type Prompt = Pick<RoutedRequest, 'tokens' | 'blockTokens'>;

/** Of the request on this worker: prompt tokens that it computes. */
export function computedTokensOf(
  prompt: Prompt,
  worker: WorkerState,
  { match, remoteBlocks, remoteMedium }: HeldOfPrompt,
): number {
  const brought = isBrought(prompt, worker, remoteBlocks, remoteMedium) ? remoteBlocks : 0;
  return Math.max(prompt.tokens - (match.blocks + brought) * prompt.blockTokens, 1);
}

/** Seconds that it brings in others for. */
export function bringSecondsOf(
  prompt: Prompt,
  worker: WorkerState,
  { match, remoteBlocks, remoteMedium }: HeldOfPrompt,
): number {
  const { loadBlocksPerS, prefillTokensPerS } = worker;
  const { blocks, byMedium } = match;
  let bringS = 0;
  if (blocks > 0) {
    const blockS = prompt.blockTokens / prefillTokensPerS;
    for (let medium = 1; medium < byMedium.length; medium++) {
      const there = byMedium[medium]!;
      if (there > 0) bringS += there * Math.min(secondsOf(loadBlocksPerS[medium]), blockS);
    }
  }
  if (isBrought(prompt, worker, remoteBlocks, remoteMedium))
    bringS += remoteBlocks * secondsOf(loadBlocksPerS[remoteMedium]);
  return bringS;
}

/** What lies elsewhere is brought where that is sooner than to compute it. */
const isBrought = (prompt: Prompt, worker: WorkerState, blocks: number, medium: number): boolean =>
  blocks > 0 && secondsOf(worker.loadBlocksPerS[medium]) < prompt.blockTokens / worker.prefillTokensPerS;

/**
 * Seconds until the worker has room for the request: blocks in its pool, and a place among those that run. What others use of its prompt
 * is there once for all; what is only cached takes room once a request uses it.
 */
export const roomS = (
  request: RoutedRequest,
  worker: WorkerState,
  { inUseBlocks = 0 }: Pick<HeldOfPrompt, 'inUseBlocks'> = {},
): number => roomForS(blocksOf(request) - inUseBlocks, worker);

/** The same for one that needs so many blocks beside those that are used. */
export function roomForS(blocks: number, worker: WorkerState): number {
  const { waiting, running, maxRunning, usedBlocks, totalBlocks, freedBlocksPerS } = worker;
  if (waiting + running === 0 || totalBlocks === 0) return 0;
  const missing = usedBlocks + worker.waitingBlocks + blocks - totalBlocks;
  const places = maxRunning === undefined ? 0 : waiting + running + 1 - maxRunning;
  // Who ends gives back as many blocks as one has on average.
  const missingWithPlaces = Math.max(missing, places > 0 ? (places * usedBlocks) / Math.max(running, 1) : 0);
  if (missingWithPlaces <= 0) return 0;
  return missingWithPlaces / (freedBlocksPerS > 0 ? freedBlocksPerS : Math.max(usedBlocks, 1) / unknownAnswerS);
}

/** Of its prompt and its answer. */
export const blocksOf = ({ tokens, maxTokens, blockTokens }: RoutedRequest): number =>
  Math.ceil((tokens + maxTokens) / blockTokens);

/** As many requests run here, or are about to, as can. */
export const isFull = ({ waiting, running, maxRunning }: WorkerState): boolean =>
  maxRunning !== undefined && waiting + running >= maxRunning;

const secondsOf = (blocksPerS: number | undefined): number =>
  blocksPerS !== undefined && blocksPerS > 0 ? 1 / blocksPerS : Number.POSITIVE_INFINITY;
