/** What the queue in front of the workers (`late-binding.ts`) knows while it looks who can go: those that wait, and the workers' loads. */
import { maxMedia } from '@kvtier/kv-index';
import type { InUse } from './in-use.ts';
import {
  almostOne,
  bringSecondsOf,
  computeAheadS,
  computedTokensOf,
  costBeforeS,
  costOf,
  fillOf,
  type HeldOfPrompt,
  isFull,
  roomS,
  usualStepTokens,
  workS,
} from './policies/predicted.ts';
import { leastBy, type Random, type RoutedRequest, type WorkerState } from './policy.ts';
import type { Ordered } from './response-order.ts';
import type { UnderWay } from './under-way.ts';

/** What a worker holds of a prompt, or will: some of it is computed just now, and is found by those that come at `fromMs` or later. */
export interface SoonHeld extends HeldOfPrompt {
  readonly fromMs?: number;
}

/** A request that waits. */
export interface Held<T> extends Ordered {
  readonly item: T;
  readonly request: RoutedRequest;
  /** Of it, what its prompt needs. */
  readonly promptMs: number;
  /** What the workers that may have it held of its prompt at `knownAtMs`, by their numbers. */
  known: (SoonHeld | undefined)[];
  /** The numbers of these workers. */
  workers: number[];
  knownAtMs: number;
  /** Blocks that some worker's GPU has of it, or is to have, at most; as known then. */
  heldBlocks: number;
  /** It has paid for waiting (`RentOrBuy`). */
  hasPaid: boolean;
  /** Since when it has waited for room on one worker while another one was open; undefined: it does not. */
  roomSinceMs: number | undefined;
  /** The round in which it was looked at last (`late-binding.ts`), and the worker that it claimed then. */
  lookedIn: number;
  waitsFor: number | undefined;
}

/**
 * What is known of every worker for one request; used until the next call. Loads are the same for all requests of a look, but for those that
 * were given meanwhile.
 */
export type StatesFor = (request: RoutedRequest) => readonly (WorkerState | undefined)[];

/** Of a worker that holds nothing of a prompt, as most do: one object for all of them. */
const holdsNothing: HeldOfPrompt = {
  match: { blocks: 0, byMedium: new Int32Array(maxMedia) },
  remoteBlocks: 0,
  remoteMedium: 0,
};

/** Asks again what the workers hold of its prompt; `underWay` and `inUse`: what was given to them. */
export function know(
  held: Held<unknown>,
  statesFor: StatesFor,
  look: Look,
  { underWay, inUse }: { readonly underWay: UnderWay; readonly inUse: InUse },
): void {
  const { nowMs } = look;
  held.workers = [];
  held.known = statesFor(held.request).map((state, worker) => {
    if (state === undefined) return undefined;
    held.workers.push(worker);
    look.tells(worker, state);
    const { match, remoteBlocks, remoteMedium } = state;
    return match.blocks + remoteBlocks === 0 ? holdsNothing : { match, remoteBlocks, remoteMedium };
  });
  held.knownAtMs = nowMs;
  const { known, workers } = held;
  let least = Number.POSITIVE_INFINITY;
  for (const worker of workers) least = Math.min(least, known[worker]!.match.blocks);
  underWay.each(held.request.keys, nowMs, least, (worker, blocks, fromMs) => {
    const now = known[worker];
    if (now !== undefined && now.match.blocks < blocks) known[worker] = soonHolds(now, blocks, fromMs);
  });
  held.heldBlocks = 0;
  for (const worker of workers) {
    const now = known[worker]!;
    const gpuBlocks = now.match.byMedium[0]!;
    if (gpuBlocks === 0) continue;
    held.heldBlocks = Math.max(held.heldBlocks, gpuBlocks);
    // Asked of few: it takes longer than all else.
    if (roomS(held.request, look.loads[worker]!) === 0) continue;
    known[worker] = { ...now, inUseBlocks: Math.min(inUse.blocksOf(held.request.keys, worker), gpuBlocks) };
  }
}

/** As it will be once what is under way there is computed. */
function soonHolds({ match, remoteBlocks, remoteMedium }: HeldOfPrompt, blocks: number, fromMs: number): SoonHeld {
  const more = blocks - match.blocks;
  const byMedium = match.byMedium.slice();
  byMedium[0]! += more;
  return { match: { blocks, byMedium }, remoteBlocks: Math.max(remoteBlocks - more, 0), remoteMedium, fromMs };
}

/** Loads are told every 20 ms, and stages follow each other: who has less ahead than this runs dry between two words. */
const leastOpenS = 0.1;
/**
 * So many times what it computes a request would rather wait than go where the pool is full, and of less full ones by the square of it: of
 * workers that are about as good the emptier one is taken, so that long answers do not fill one before the others.
 */
const fillWeight = 4;
/** Full steps: one, and the few tokens that are beside it. */
const openSteps = 1.025;

/**
 * Seconds of work that a worker has ahead at most when it gets more, `mostS` or less: what one step computes, and what lasts until the next word of it. So its next step is there before
 * the last one ends, and what waits can go elsewhere until then.
 */
export const opensAtS = ({ maxStepTokens = usualStepTokens, prefillTokensPerS }: WorkerState, mostS: number): number =>
  Math.min(Math.max((openSteps * maxStepTokens) / prefillTokensPerS, leastOpenS), mostS);

/** One look at those that wait: the workers' loads, and what has been claimed of them. Of one moment: nothing of it is used in a later one. */
export class Look {
  readonly #openS: number;
  readonly nowMs: number;
  #waiting: number;
  /** Who claimed a place in an earlier look of the round. */
  readonly #claimed: readonly Held<unknown>[];
  readonly loads: WorkerState[] = [];
  /** Of each worker, seconds that nobody's cost there is below. */
  readonly #beforeS: number[] = [];
  /** Those that had time when it was last told of loads, and may have none by now: all that somebody can be given to. */
  readonly #open: number[] = [];
  /** Seconds, of what is computed and of loads. */
  readonly #claims: number[] = [];
  readonly #loadClaims: number[] = [];

  constructor(openS: number, waiting: number, nowMs: number, claimed: readonly Held<unknown>[]) {
    this.nowMs = nowMs;
    this.#openS = openS;
    this.#waiting = waiting;
    this.#claimed = claimed;
  }

  /** After somebody was given to a worker: loads are other ones than they were. */
  goesOn(waiting: number): void {
    this.#waiting = waiting;
    this.#open.length = 0;
    for (let worker = 0; worker < this.loads.length; worker++) this.#looksAt(worker);
  }

  tells(worker: number, load: WorkerState): void {
    const isNew = this.loads[worker] === undefined;
    this.loads[worker] = load;
    if (!isNew) return;
    for (const held of this.#claimed) if (held.waitsFor === worker) this.#claimsOf(held, worker);
    this.#looksAt(worker);
  }

  #looksAt(worker: number): void {
    const load = this.loads[worker];
    this.#beforeS[worker] = load === undefined ? 0 : costBeforeS(load);
    if (this.#hasTime(worker)) this.#open.push(worker);
  }

  /** The loads of all workers that may have it. */
  knowsAll({ workers }: Held<unknown>): boolean {
    for (const worker of workers) if (this.loads[worker] === undefined) return false;
    return true;
  }

  /** Some worker has time for it; whether it has room is seen later. */
  mayOpen({ known }: Held<unknown>): boolean {
    for (const worker of this.#open) if (known[worker] !== undefined && this.#hasTime(worker)) return true;
    return false;
  }

  /** It can have its place there, and finds what is being computed for it. */
  isOpen({ request, known }: Held<unknown>, worker: number): boolean {
    const load = this.loads[worker]!;
    if (!this.#hasTime(worker) || roomS(request, load, known[worker]!) > 0) return false;
    if (bringSecondsOf(request, load, known[worker]!) > 0 && !this.#hasTimeToLoad(worker)) return false;
    // Who has nothing to do does not compute it any more.
    return this.nowMs >= (known[worker]!.fromMs ?? 0) || this.aheadS(worker) === 0;
  }

  /** The worker that serves it soonest. There is one. */
  best({ request, workers, known }: Held<unknown>, random: Random): number {
    const { tokens, blockTokens } = request;
    const { atWorkers, all } = this.#crowd(workers);
    let best = workers[0]!;
    let least = Number.POSITIVE_INFINITY;
    let ties = 0;
    for (const worker of workers) {
      const load = this.loads[worker]!;
      const held = known[worker]!;
      const claimed = this.#claims[worker] ?? 0;
      // Nobody waits in front of the workers for one that has nothing to do.
      const weight = this.aheadS(worker) === 0 ? atWorkers : all;
      // It costs no less than what is ahead there and what it would compute: that alone tells most from the best one.
      const computed = Math.max(tokens - (held.match.blocks + held.remoteBlocks) * blockTokens, 1);
      const queuedTokens = load.tokensAhead - (load.stepTokens ?? 0) + computed * weight;
      const mostS = least * almostOne - claimed - this.#beforeS[worker]!;
      if (queuedTokens > mostS * load.prefillTokensPerS) continue;
      const serveS = costOf(request, load, claimed, this.#loadClaims[worker] ?? 0, weight, held);
      const computeS = computedTokensOf(request, load, held) / load.prefillTokensPerS;
      const cost = serveS + fillWeight * fillOf(load) ** 2 * computeS;
      if (cost < least) {
        best = worker;
        least = cost;
        ties = 1;
      } else if (cost === least && random() * ++ties < 1) best = worker;
    }
    return best;
  }

  /** It would wait for `best`, which holds some of it: the worker that has nothing to do and serves it soonest, if there is one. */
  idleBeside(held: Held<unknown>, best: number, random: Random): number | undefined {
    const { request, known } = held;
    if (known[best]!.match.blocks === 0) return undefined;
    return this.#soonest(
      held,
      random,
      (worker) =>
        worker !== best && this.aheadS(worker) === 0 && roomS(request, this.loads[worker]!, known[worker]!) === 0,
    );
  }

  /**
   * It waits for room on `best`: the worker that is open for it and serves it soonest, if there is one. When a worker will have room
   * nobody knows; what it freed a second says nothing of the one answer that runs on.
   */
  roomBeside(held: Held<unknown>, best: number, random: Random): number | undefined {
    if (!this.#hasTime(best) || roomS(held.request, this.loads[best]!, held.known[best]!) === 0) return undefined;
    return this.#soonest(held, random, (worker) => this.isOpen(held, worker));
  }

  /** Of those with time which it may have and that are wanted. */
  #soonest(
    { request, known }: Held<unknown>,
    random: Random,
    isWanted: (worker: number) => boolean,
  ): number | undefined {
    const wanted = this.#open.filter((worker) => known[worker] !== undefined && isWanted(worker));
    if (wanted.length === 0) return undefined;
    return leastBy(wanted, random, (worker) => costOf(request, this.loads[worker]!, 0, 0, 1, known[worker]!));
  }

  /** What it waits longer at `best` than it would at the other one, if that held as much of it. */
  rentS({ request, known }: Held<unknown>, best: number, other: number): number {
    const held = known[best]!;
    const claimedS = this.#claims[best] ?? 0;
    const atBestS = costOf(request, this.loads[best]!, claimedS, this.#loadClaims[best] ?? 0, 1, held);
    return atBestS - costOf(request, this.loads[other]!, 0, 0, 1, held);
  }

  /** What it costs all, in seconds, if the request is served there and not on `best`: they wait, too, for what it is more work. */
  priceForAllS(held: Held<unknown>, worker: number, best: number): number {
    return this.moreWorkS(held, worker, best) * this.#crowd(held.workers).all;
  }

  /** What it is more work on this worker than on `best`, in seconds. */
  moreWorkS({ request, known }: Held<unknown>, worker: number, best: number): number {
    return workS(request, this.loads[worker]!, known[worker]!) - workS(request, this.loads[best]!, known[best]!);
  }

  /** How long none would be open if it took this worker, in seconds; 0: some other one is, or there is none. */
  closedS({ workers }: Held<unknown>, worker: number): number {
    if (workers.length === 1) return 0;
    let soonest = Number.POSITIVE_INFINITY;
    for (const other of workers) {
      if (other === worker) continue;
      const load = this.loads[other]!;
      soonest = Math.min(soonest, this.#computesS(load, other) - opensAtS(load, this.#openS));
    }
    return Math.max(soonest, 0);
  }

  /** Of its prompt, what this worker holds or is brought: 0 to 1. */
  heldShare({ request, known }: Held<unknown>, worker: number): number {
    return 1 - computedTokensOf(request, this.loads[worker]!, known[worker]!) / Math.max(request.tokens, 1);
  }

  /** What the request takes on this worker, in seconds. */
  workS({ request, known }: Held<unknown>, worker: number): number {
    return workS(request, this.loads[worker]!, known[worker]!);
  }

  /**
   * How long it takes there until its first token; and of that, the step that computes its last tokens. Steps before that one are full, with
   * what waits there already.
   */
  takes({ request, known }: Held<unknown>, worker: number): { readonly seconds: number; readonly lastStepS: number } {
    const load = this.loads[worker]!;
    const { tokensAhead, stepTokens = 0, maxStepTokens = usualStepTokens, prefillTokensPerS } = load;
    const tokens = Math.max(tokensAhead - stepTokens, 0) + computedTokensOf(request, load, known[worker]!);
    const lastStepTokens = tokens - (Math.ceil(tokens / maxStepTokens) - 1) * maxStepTokens;
    const seconds = costOf(request, load, 0, 0, 1, known[worker]!);
    return { seconds, lastStepS: lastStepTokens / prefillTokensPerS };
  }

  /** It waits for this worker: who comes after it finds less of it. */
  claim(held: Held<unknown>, worker: number): void {
    held.waitsFor = worker;
    this.#claimsOf(held, worker);
  }

  #claimsOf({ request, known }: Held<unknown>, worker: number): void {
    const load = this.loads[worker]!;
    const held = known[worker]!;
    const computeS = computedTokensOf(request, load, held) / load.prefillTokensPerS;
    this.#claims[worker] = (this.#claims[worker] ?? 0) + computeS;
    this.#loadClaims[worker] = (this.#loadClaims[worker] ?? 0) + bringSecondsOf(request, load, held);
  }

  /** Seconds of work that it has, and of those that wait for it: what is loaded is loaded while others compute. */
  aheadS(worker: number): number {
    const load = this.loads[worker]!;
    return Math.max(this.#computesS(load, worker), this.#loadsS(load, worker));
  }

  #computesS(load: WorkerState, worker: number): number {
    return computeAheadS(load) + (this.#claims[worker] ?? 0);
  }

  #loadsS(load: WorkerState, worker: number): number {
    return load.loadAheadS + (this.#loadClaims[worker] ?? 0);
  }

  /** Who loads computes for others meanwhile. */
  #hasTime(worker: number): boolean {
    const load = this.loads[worker];
    return load !== undefined && this.#computesS(load, worker) <= opensAtS(load, this.#openS);
  }

  #hasTimeToLoad(worker: number): boolean {
    const load = this.loads[worker]!;
    return this.#loadsS(load, worker) <= opensAtS(load, this.#openS);
  }

  /** What a second of work costs all: with those that wait at workers, and with those in front of them, too. */
  #crowd(workers: readonly number[]): { readonly atWorkers: number; readonly all: number } {
    let full = 0;
    let waiting = 0;
    for (const worker of workers) {
      const load = this.loads[worker]!;
      if (isFull(load)) full++;
      waiting += load.waiting;
    }
    // Where places are what is short, nobody waits for a prompt to be computed.
    if (full * 2 >= workers.length) return { atWorkers: 1, all: 1 };
    const each = 1 / workers.length / 2;
    return { atWorkers: 1 + waiting * each, all: 1 + (waiting + this.#waiting) * each };
  }
}
