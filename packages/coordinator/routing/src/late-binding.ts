/**
 * The coordinator's queue in front of our own policy: a request is given to a worker when that worker is about to have
 * nothing to do, and not before. While it waits here it can still go anywhere; a request in a worker's own queue cannot.
 *
 *   - A worker is open while its work ahead is below `openS` and it has room for the request.
 *   - Requests are looked at by their response ratio, (waited + needs) ÷ needs, the largest first (HRRN: Brinch Hansen
 *     1971): short ones soon, long ones surely.
 *     An answer counts, too, as far as it slows the worker: where answers are what takes time, nobody is short.
 *   - Each takes the worker that serves it soonest, counting what those before it have claimed. If that worker is open it
 *     goes there; if not it keeps waiting, and claims its place.
 *   - Where it would wait though some worker has nothing to do, it may go to that one, for those that come after it (`rent-or-buy.ts`).
 *
 * Without a queue, this is the policy itself: the first look sends the request. Bounded: beyond `maxHeld` nothing is taken.
 */
import {
  bringSecondsOf,
  computedTokensOf,
  costOf,
  type HeldOfPrompt,
  isFull,
  roomS,
  workS,
} from './policies/predicted.ts';
import { leastBy, type Random, type RoutedRequest, type WorkerState } from './policy.ts';
import { RentOrBuy } from './rent-or-buy.ts';

export interface LateBindingOptions {
  /** Work that a worker has ahead at most when it gets more. */
  readonly openS: number;
  /** Requests that wait at most. */
  readonly maxHeld: number;
  /** Requests that one look considers at most. */
  readonly maxLooked: number;
  /** So long what is held of a prompt counts as known while the request waits (250); who goes is asked anew. */
  readonly knownMs?: number;
}

export const lateBindingDefaults: LateBindingOptions = { openS: 0.2, maxHeld: 4096, maxLooked: 64 };
const usualKnownMs = 250;

/** Answers are seldom as long as clients allow. */
const likelyTokens = 512;
/** What a token of an answer costs its worker, for the order alone: a tenth of a step's least. */
const answerMs = 0.1;

interface Held<T> {
  readonly item: T;
  readonly request: RoutedRequest;
  readonly sinceMs: number;
  readonly needsMs: number;
  /** What the workers that may have it held of its prompt at `knownAtMs`, by their numbers. */
  known: (HeldOfPrompt | undefined)[];
  /** The numbers of these workers. */
  workers: number[];
  knownAtMs: number;
  /** It has paid for waiting (`RentOrBuy`). */
  hasPaid: boolean;
}

export interface Assignment<T> {
  readonly item: T;
  readonly worker: number;
}

/** What is known of every worker for one request; used until the next call. Loads are the same for all requests. */
export type StatesFor = (request: RoutedRequest) => readonly (WorkerState | undefined)[];

/** Asks again what the workers hold of its prompt. */
function know(held: Held<unknown>, statesFor: StatesFor, nowMs: number, look: Look): void {
  held.workers = [];
  held.known = statesFor(held.request).map((state, worker) => {
    if (state === undefined) return undefined;
    held.workers.push(worker);
    look.loads[worker] = state;
    const { match, remoteBlocks, remoteMedium } = state;
    return { match, remoteBlocks, remoteMedium };
  });
  held.knownAtMs = nowMs;
}

/** One look at those that wait: the workers' loads, and what has been claimed of them. */
class Look {
  readonly #openS: number;
  readonly #waiting: number;
  readonly loads: WorkerState[] = [];
  /** Seconds, of what is computed and of loads. */
  readonly #claims: number[] = [];
  readonly #loadClaims: number[] = [];

  constructor(openS: number, waiting: number) {
    this.#openS = openS;
    this.#waiting = waiting;
  }

  /** The loads of all workers that may have it. */
  knowsAll({ workers }: Held<unknown>): boolean {
    for (const worker of workers) if (this.loads[worker] === undefined) return false;
    return true;
  }

  /** Some worker has time for it; whether it has room is seen later. */
  mayOpen({ workers }: Held<unknown>): boolean {
    for (const worker of workers) if (this.#hasTime(worker)) return true;
    return false;
  }

  isOpen({ request }: Held<unknown>, worker: number): boolean {
    return this.#hasTime(worker) && roomS(request, this.loads[worker]!) === 0;
  }

  /** The worker that serves it soonest. There is one. */
  best({ request, workers, known }: Held<unknown>, random: Random): number {
    const { atWorkers, all } = this.#crowd(workers);
    return leastBy(workers, random, (worker) => {
      const load = this.loads[worker]!;
      const claimed = this.#claims[worker] ?? 0;
      const claimedLoad = this.#loadClaims[worker] ?? 0;
      // Nobody waits in front of the workers for one that has nothing to do.
      const weight = this.aheadS(worker) === 0 ? atWorkers : all;
      return costOf(request, load, claimed, claimedLoad, weight, known[worker]!);
    });
  }

  /** It would wait for `best`, which holds some of it: the worker that has nothing to do and serves it soonest, if there is one. */
  idleBeside({ request, workers, known }: Held<unknown>, best: number, random: Random): number | undefined {
    if (known[best]!.match.blocks === 0 || this.aheadS(best) === 0) return undefined;
    let found = false;
    const idle = leastBy(workers, random, (worker) => {
      const load = this.loads[worker]!;
      if (this.aheadS(worker) > 0 || roomS(request, load) > 0) return Number.POSITIVE_INFINITY;
      found = true;
      return costOf(request, load, 0, 0, 1, known[worker]!);
    });
    return found ? idle : undefined;
  }

  /** What it is more work on this worker than on `best`, in seconds. */
  moreWorkS({ request, known }: Held<unknown>, worker: number, best: number): number {
    return workS(request, this.loads[worker]!, known[worker]!) - workS(request, this.loads[best]!, known[best]!);
  }

  /** It waits for this worker: who comes after it finds less of it. */
  claim({ request, known }: Held<unknown>, worker: number): void {
    const load = this.loads[worker]!;
    const held = known[worker]!;
    const computeS = computedTokensOf(request, load, held) / load.prefillTokensPerS;
    this.#claims[worker] = (this.#claims[worker] ?? 0) + computeS;
    this.#loadClaims[worker] = (this.#loadClaims[worker] ?? 0) + bringSecondsOf(request, load, held);
  }

  /** Seconds of work that it has, and of those that wait for it: what is loaded is loaded while others compute. */
  aheadS(worker: number): number {
    const { tokensAhead, prefillTokensPerS, loadAheadS } = this.loads[worker]!;
    const computeS = tokensAhead / prefillTokensPerS + (this.#claims[worker] ?? 0);
    return Math.max(computeS, loadAheadS + (this.#loadClaims[worker] ?? 0));
  }

  #hasTime(worker: number): boolean {
    return this.loads[worker] !== undefined && this.aheadS(worker) < this.#openS;
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

export class LateBinding<T> {
  readonly #options: LateBindingOptions;
  #held: Held<T>[] = [];
  readonly #rents = new RentOrBuy();

  constructor(options: LateBindingOptions = lateBindingDefaults) {
    this.#options = options;
  }

  /** Requests that wait. */
  get size(): number {
    return this.#held.length;
  }

  get isFull(): boolean {
    return this.#held.length >= this.#options.maxHeld;
  }

  /** `needsMs`: what it takes at best, from its prompt and what is held of it. */
  add(item: T, request: RoutedRequest, nowMs: number, needsMs: number): void {
    this.#held.push({
      item,
      request,
      sinceMs: nowMs,
      needsMs: Math.max(needsMs, 1) + Math.min(request.maxTokens, likelyTokens) * answerMs,
      known: [],
      workers: [],
      knownAtMs: Number.NEGATIVE_INFINITY,
      hasPaid: false,
    });
  }

  /** The request goes, served or not. */
  remove(item: T): void {
    const at = this.#held.findIndex((held) => held.item === item);
    if (at >= 0) this.#held.splice(at, 1);
  }

  /** The next request that can be given to a worker now, if there is one; to be asked until there is none. */
  take(statesFor: StatesFor, nowMs: number, random: Random): Assignment<T> | undefined {
    const { knownMs = usualKnownMs } = this.#options;
    const look = new Look(this.#options.openS, this.#held.length);
    for (const held of this.#first(nowMs)) {
      // The first one is always asked for: it tells the loads, too.
      if (nowMs - held.knownAtMs > knownMs || !look.knowsAll(held)) know(held, statesFor, nowMs, look);
      if (!look.mayOpen(held)) continue;
      let best = look.best(held, random);
      let idle = held.hasPaid ? undefined : look.idleBeside(held, best, random);
      if ((idle !== undefined || look.isOpen(held, best)) && held.knownAtMs < nowMs) {
        know(held, statesFor, nowMs, look);
        if (held.workers.length === 0) continue;
        best = look.best(held, random);
        idle = held.hasPaid ? undefined : look.idleBeside(held, best, random);
      }
      if (idle !== undefined) {
        held.hasPaid = true;
        const { blocks } = held.known[best]!.match;
        const priceS = look.moreWorkS(held, idle, best);
        if (this.#rents.pays(held.request.keys, blocks, look.aheadS(best), priceS)) best = idle;
      }
      if (look.isOpen(held, best)) {
        this.remove(held.item);
        return { item: held.item, worker: best };
      }
      look.claim(held, best);
    }
    return undefined;
  }

  /** Those that a look considers, the largest response ratio first; of equal ones, who came first. */
  #first(nowMs: number): Held<T>[] {
    const first: Held<T>[] = [];
    const ratios: number[] = [];
    for (const held of this.#held) {
      const ratio = (nowMs - held.sinceMs) / held.needsMs;
      let at = first.length;
      if (at === this.#options.maxLooked) {
        if (ratio <= ratios[at - 1]!) continue;
        first.pop();
        ratios.pop();
        at--;
      }
      while (at > 0 && ratios[at - 1]! < ratio) at--;
      first.splice(at, 0, held);
      ratios.splice(at, 0, ratio);
    }
    return first;
  }
}
