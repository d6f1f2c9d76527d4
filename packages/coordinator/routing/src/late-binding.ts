/**
 * The coordinator's queue in front of our own policy: a request is given to a worker when that worker is about to have
 * nothing to do, and not before. While it waits here it can still go anywhere; a request in a worker's own queue cannot.
 *
 *   - A worker is open while it has no more ahead than one step computes (`opensAtS`), and room for the request.
 *   - Requests are looked at by their response ratio (`response-order.ts`): short ones soon, long ones surely.
 *     An answer counts, too, as far as it slows the worker: where answers are what takes time, nobody is short.
 *   - Each takes the worker that serves it soonest, counting what those before it have claimed. If that worker is open it
 *     goes there; if not it keeps waiting, and claims its place.
 *   - What is being computed counts as held where it is: no document is computed twice because two ask at once (`under-way.ts`).
 *   - The last worker that is open is left to short ones, where many of them come (`#keepsFree`).
 *   - The longest request begins first, where it would be under way alone after all others (`longest-request.ts`).
 *   - Where it waits for room though another worker has some, it goes there once it has waited as long as that costs all.
 *   - Where it would wait though some worker has nothing to do, it may go to that one, for those that come after it (`rent-or-buy.ts`).
 *
 * Without a queue, this is the policy itself: the first look sends the request. Bounded: beyond `maxHeld` nothing is taken.
 *
 * A look at many requests and workers may take longer than a turn should: the caller says when its time is over. Looks are made in rounds:
 *
 *     turn 1    a b c │ d e f g        the time is over: a, b and c are marked, and nothing else of the look is kept
 *     turn 2    d e   │ f g            another look, at loads and an order of now; a, b and c claim their places, and are left out
 *     turn 3    f g                    all were looked at: the round is over
 *
 * Else those in front, whom no worker that is open suits, would be all that is looked at. What opens for a, b or c in the middle of a round
 * is for the next one: where there was news meanwhile, the caller has to look once more.
 */
import { Arrivals } from './arrivals.ts';
import { InUse } from './in-use.ts';
import { LongestRequest } from './longest-request.ts';
import { type Held, know, Look, type StatesFor } from './look.ts';
import { blocksOf, type HeldOfPrompt } from './policies/predicted.ts';
import type { Random, RoutedRequest } from './policy.ts';
import { RentOrBuy } from './rent-or-buy.ts';
import { ResponseOrder } from './response-order.ts';
import { UnderWay } from './under-way.ts';

export interface LateBindingOptions {
  /** Work that a worker has ahead at most when it gets more: what a step computes, and no more than this. */
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

/** What keeps one look short. */
export interface LookLimits {
  /** Whether some worker that it may have is open. Who has none is not considered: he would only keep others from being. Default: all. */
  readonly mayGo?: (request: RoutedRequest) => boolean;
  /** The time for this turn is over; asked before each request. Default: never. */
  readonly isOver?: () => boolean;
}

/** A look that is under way, at the queue as it is and at one time. */
interface Pass<T> {
  readonly look: Look;
  readonly order: readonly Held<T>[];
  /** How far it has come. */
  at: number;
}

export interface Assignment<T> {
  readonly item: T;
  readonly worker: number;
  /** What the worker will hold of its prompt, with what is being computed there. */
  readonly held: HeldOfPrompt;
}

export class LateBinding<T> {
  readonly #options: LateBindingOptions;
  #held: Held<T>[] = [];
  readonly #rents = new RentOrBuy();
  readonly #underWay = new UnderWay();
  readonly #inUse = new InUse();
  readonly #arrivals = new Arrivals();
  readonly #longest = new LongestRequest();
  readonly #order = new ResponseOrder();
  /** What those that wait need, in ms. */
  #queuedMs = 0;
  #workers = 1;
  #pass: Pass<T> | undefined;
  #round = 0;
  /** In this round. */
  #hasGiven = false;
  /** When the last look's time was over before all of the round had been looked at; undefined: it was not. */
  #cutAtMs: number | undefined;
  /** When no worker was open, as far as anybody said. */
  #closedAtMs = Number.NEGATIVE_INFINITY;
  /** Of those that wait, who needs the fewest blocks; undefined: nobody knows, or nobody waits. */
  #smallest: Held<T> | undefined;

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

  /** Some that wait were not looked at in this round. */
  get isMidway(): boolean {
    return this.#cutAtMs !== undefined;
  }

  /** What the one needs that needs the fewest blocks: where there is no room for so many, there is for none. undefined: nobody waits. */
  get leastBlocks(): number | undefined {
    for (const held of this.#smallest === undefined ? this.#held : [])
      if (this.#smallest === undefined || needsBlocks(held) < needsBlocks(this.#smallest)) this.#smallest = held;
    return this.#smallest && needsBlocks(this.#smallest);
  }

  /**
   * `atBestMs`: what it takes at best, from its prompt and what is held of it; `gpuBlocks`: the most that some worker's GPU has of it. What is
   * being computed for others is taken from both.
   */
  add(item: T, request: RoutedRequest, nowMs: number, atBestMs: number, gpuBlocks = 0): void {
    const heldBlocks = Math.max(this.#underWay.mostOf(request.keys, nowMs), gpuBlocks);
    const lacks = (blocks: number): number => Math.max(request.tokens - blocks * request.blockTokens, 1);
    const needsMs = (atBestMs * lacks(heldBlocks)) / lacks(gpuBlocks);
    this.#arrivals.came(nowMs, needsMs);
    this.#queuedMs += needsMs;
    const held: Held<T> = {
      item,
      request,
      sinceMs: nowMs,
      promptMs: needsMs,
      needsMs: Math.max(needsMs, 1) + Math.min(request.maxTokens, likelyTokens) * answerMs,
      known: [],
      workers: [],
      knownAtMs: Number.NEGATIVE_INFINITY,
      heldBlocks,
      hasPaid: false,
      roomSinceMs: undefined,
      lookedIn: -1,
      waitsFor: undefined,
    };
    const smallest = this.#held.length === 0 ? held : this.#smallest;
    if (smallest !== undefined) this.#smallest = needsBlocks(held) < needsBlocks(smallest) ? held : smallest;
    this.#held.push(held);
    this.#pass = undefined;
  }

  /** The request goes without having been given. */
  remove(item: T): void {
    this.#remove(this.#held.findIndex((held) => held.item === item));
    this.#pass = undefined;
  }

  #remove(at: number): void {
    if (at < 0) return;
    const [gone] = this.#held.splice(at, 1);
    if (gone === this.#smallest) this.#smallest = undefined;
    this.#queuedMs = this.#held.length === 0 ? 0 : this.#queuedMs - gone!.promptMs;
    if (this.#held.length === 0) this.#cutAtMs = undefined;
  }

  /** What was given has ended: its worker does not use its prompt any more, and never will hold it where it was not computed. */
  ended(item: T, isComputed = true): void {
    this.#inUse.ended(item);
    if (!isComputed) this.#underWay.ended(item);
  }

  /** This number stands for another worker from now on, or for one that does not go on with what it had, or for none. */
  left(worker: number): void {
    this.#underWay.left(worker);
    this.#inUse.left(worker);
    this.changed();
  }

  /** Workers came or left, or others may have them than before. */
  changed(): void {
    this.#pass = undefined;
    for (const held of this.#held) {
      held.knownAtMs = Number.NEGATIVE_INFINITY;
      held.waitsFor = undefined;
    }
  }

  /** No worker is open: nobody waits for a better one. */
  closed(nowMs: number): void {
    this.#closedAtMs = nowMs;
  }

  /** The next request that can be given to a worker now, if there is one; to be asked until there is none. */
  take(statesFor: StatesFor, nowMs: number, random: Random, limits: LookLimits = {}): Assignment<T> | undefined {
    for (;;) {
      const pass = this.#passAt(nowMs, limits.mayGo);
      let knowsLoads = false;
      for (; pass.at < pass.order.length; pass.at++) {
        const held = pass.order[pass.at]!;
        if (limits.isOver?.() === true) {
          this.#pass = undefined;
          this.#cutAtMs = nowMs;
          return undefined;
        }
        // The first one is always asked for: it tells the loads, too.
        if (!knowsLoads) {
          this.#know(held, statesFor, pass.look);
          pass.look.goesOn(this.#held.length);
          this.#order.sees(pass.look.loads);
          knowsLoads = true;
        }
        held.lookedIn = this.#round;
        held.waitsFor = undefined;
        const worker = this.#workerFor(held, pass.look, statesFor, random);
        if (worker === undefined) continue;
        pass.at++;
        this.#hasGiven = true;
        this.#gives(pass.look, held, worker, nowMs);
        return { item: held.item, worker, held: held.known[worker]! };
      }
      this.#pass = undefined;
      // What was given may be what others waited for behind it; and there is a place for more among those that are considered.
      if (!this.#hasGiven) return undefined;
    }
  }

  /** The look that is under way, or another one: of the same round where the time of the one before was over, not long ago. */
  #passAt(nowMs: number, mayGo: LookLimits['mayGo']): Pass<T> {
    const { openS, knownMs = usualKnownMs } = this.#options;
    if (this.#pass?.look.nowMs === nowMs) return this.#pass;
    if (this.#cutAtMs === undefined || nowMs - this.#cutAtMs > knownMs) {
      this.#round++;
      this.#hasGiven = false;
    }
    this.#cutAtMs = undefined;
    const first = this.#first(nowMs, mayGo);
    const wasLooked = ({ lookedIn }: Held<T>): boolean => lookedIn === this.#round;
    const look = new Look(openS, this.#held.length, nowMs, first.filter(wasLooked));
    this.#pass = { look, order: first.filter((held) => !wasLooked(held)), at: 0 };
    return this.#pass;
  }

  #know(held: Held<T>, statesFor: StatesFor, look: Look): void {
    const before = held.heldBlocks;
    know(held, statesFor, look, { underWay: this.#underWay, inUse: this.#inUse });
    if (held.heldBlocks !== before) this.#smallest = undefined;
  }

  /** The worker that it can be given to now. Where there is none, it claims its place. */
  #workerFor(held: Held<T>, look: Look, statesFor: StatesFor, random: Random): number | undefined {
    const { knownMs = usualKnownMs } = this.#options;
    const { nowMs } = look;
    if (nowMs - held.knownAtMs > knownMs || !look.knowsAll(held)) this.#know(held, statesFor, look);
    if (!look.mayOpen(held)) {
      held.roomSinceMs = undefined;
      return undefined;
    }
    let best = look.best(held, random);
    let idle = held.hasPaid ? undefined : look.idleBeside(held, best, random);
    const mayBeGiven = (): boolean =>
      idle !== undefined || look.isOpen(held, best) || look.roomBeside(held, best, random) !== undefined;
    if (held.knownAtMs < nowMs && mayBeGiven()) {
      this.#know(held, statesFor, look);
      if (held.workers.length === 0) return undefined;
      best = look.best(held, random);
      idle = held.hasPaid ? undefined : look.idleBeside(held, best, random);
    }
    if (idle !== undefined) {
      const rentS = look.rentS(held, best, idle);
      if (rentS > 0) {
        held.hasPaid = true;
        const { blocks } = held.known[best]!.match;
        const priceS = look.moreWorkS(held, idle, best);
        if (this.#rents.pays(held.request.keys, blocks, rentS, priceS, nowMs)) best = idle;
      }
    }
    const open = look.roomBeside(held, best, random);
    if (open === undefined) held.roomSinceMs = undefined;
    else {
      const { roomSinceMs = nowMs } = held;
      held.roomSinceMs = roomSinceMs > this.#closedAtMs ? roomSinceMs : nowMs;
      // Of those who wait for room nobody knows how long: at most twice is paid what who knows it pays (as in `rent-or-buy.ts`).
      if (nowMs - held.roomSinceMs >= look.priceForAllS(held, open, best) * 1000) best = open;
    }
    if (look.isOpen(held, best) && !this.#keepsFree(look, held, best, nowMs)) return best;
    look.claim(held, best);
    return undefined;
  }

  #gives(look: Look, held: Held<T>, worker: number, nowMs: number): void {
    const { item, request, workers } = held;
    this.#remove(this.#held.indexOf(held));
    const { seconds, lastStepS } = look.takes(held, worker);
    this.#inUse.given(item, request.keys, worker);
    this.#order.given(look.heldShare(held, worker));
    if (2 * held.known[worker]!.match.blocks < request.keys.length) {
      this.#underWay.given(item, request.keys, worker, nowMs, seconds * 1000, lastStepS * 1000);
    }
    this.#workers = workers.length;
    const loads = workers.map((number) => look.loads[number]!);
    this.#longest.begins(seconds * 1000, request.maxTokens, loads, nowMs);
  }

  /**
   * The worker is the last one that is open, and is left to shorter ones: those that come before another one is open would wait for
   * half of that time each, which is more, in all, than all of it for each that waits now.
   */
  #keepsFree(look: Look, held: Held<T>, worker: number, nowMs: number): boolean {
    const workS = look.workS(held, worker);
    const closedS = Math.min(look.closedS(held, worker), workS);
    if (closedS <= 0 || this.#arrivals.haveEnded(nowMs)) return false;
    const come = this.#arrivals.shorterPerS((workS * 1000) / 2, nowMs, closedS) * closedS;
    return come / 2 > this.#held.length;
  }

  /** Who must begin now, or it is under way alone after all others. */
  #mustBegin(nowMs: number): Held<T> | undefined {
    const takesMs = ({ promptMs, request }: Held<T>): number => this.#longest.takesMs(promptMs, request.maxTokens);
    const one = longest(this.#held, takesMs);
    if (one === undefined) return undefined;
    const othersMs = (this.#queuedMs - one.promptMs) / this.#workers;
    const { promptMs, request } = one;
    const haveEnded = this.#arrivals.haveEnded(nowMs);
    return this.#longest.mustBegin(promptMs, request.maxTokens, othersMs, nowMs, haveEnded) ? one : undefined;
  }

  /** Those that a look considers: who must begin now, then the largest response ratio first; of equal ones, who came first. */
  #first(nowMs: number, mayGo: LookLimits['mayGo']): Held<T>[] {
    const first: Held<T>[] = [];
    const ratios: number[] = [];
    const now = this.#mustBegin(nowMs);
    const { power } = this.#order;
    for (const held of this.#held) {
      if (held.roomSinceMs !== undefined && mayGo?.(held.request) === false) held.roomSinceMs = undefined;
      const ratio = held === now ? Number.POSITIVE_INFINITY : this.#order.ratio(held, nowMs, power);
      let at = first.length;
      if (at === this.#options.maxLooked) {
        if (ratio <= ratios[at - 1]!) continue;
        if (mayGo?.(held.request) === false) continue;
        first.pop();
        ratios.pop();
        at--;
      } else if (mayGo?.(held.request) === false) continue;
      while (at > 0 && ratios[at - 1]! < ratio) at--;
      first.splice(at, 0, held);
      ratios.splice(at, 0, ratio);
    }
    return first;
  }
}

/** Beside what some worker has of it already. */
const needsBlocks = ({ request, heldBlocks }: Held<unknown>): number => blocksOf(request) - heldBlocks;

function longest<T>(held: readonly Held<T>[], of: (held: Held<T>) => number): Held<T> | undefined {
  let first: Held<T> | undefined;
  for (const one of held) if (first === undefined || of(one) > of(first)) first = one;
  return first;
}
