/**
 * The coordinator's queue in front of our own policy: a request is given to a worker when that worker is about to have
 * nothing to do, and not before. While it waits here it can still go anywhere; a request in a worker's own queue cannot.
 *
 *   - A worker is open while it has no more ahead than one step computes (`opensAtS`), and room for the request.
 *   - Requests are looked at by their response ratio, (waited + needs) ÷ needs, the largest first (HRRN: Brinch Hansen
 *     1971): short ones soon, long ones surely.
 *     An answer counts, too, as far as it slows the worker: where answers are what takes time, nobody is short.
 *   - Each takes the worker that serves it soonest, counting what those before it have claimed. If that worker is open it
 *     goes there; if not it keeps waiting, and claims its place.
 *   - What is being computed counts as held where it is: no document is computed twice because two ask at once (`under-way.ts`).
 *   - The last worker that is open is left to short ones, where many of them come (`#keepsFree`).
 *   - The longest answer begins first, where it would run on alone after all others (`longest-answer.ts`).
 *   - Where it waits for room though another worker has some, it goes there once it has waited as long as that costs all.
 *   - Where it would wait though some worker has nothing to do, it may go to that one, for those that come after it (`rent-or-buy.ts`).
 *
 * Without a queue, this is the policy itself: the first look sends the request. Bounded: beyond `maxHeld` nothing is taken.
 */
import { Arrivals } from './arrivals.ts';
import { LongestAnswer } from './longest-answer.ts';
import { type Held, know, Look, type StatesFor } from './look.ts';
import type { HeldOfPrompt } from './policies/predicted.ts';
import type { Random, RoutedRequest } from './policy.ts';
import { RentOrBuy } from './rent-or-buy.ts';
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
  readonly #arrivals = new Arrivals();
  readonly #longest = new LongestAnswer();
  /** What those that wait need, in ms. */
  #queuedMs = 0;
  #workers = 1;

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
    this.#arrivals.came(nowMs, needsMs);
    this.#queuedMs += needsMs;
    this.#held.push({
      item,
      request,
      sinceMs: nowMs,
      promptMs: needsMs,
      needsMs: Math.max(needsMs, 1) + Math.min(request.maxTokens, likelyTokens) * answerMs,
      known: [],
      workers: [],
      knownAtMs: Number.NEGATIVE_INFINITY,
      hasPaid: false,
      roomSinceMs: undefined,
    });
  }

  /** The request goes, served or not. */
  remove(item: T): void {
    const at = this.#held.findIndex((held) => held.item === item);
    if (at < 0) return;
    const [gone] = this.#held.splice(at, 1);
    this.#queuedMs = this.#held.length === 0 ? 0 : this.#queuedMs - gone!.promptMs;
  }

  /** This number stands for another worker from now on, or for one that does not go on with what it had, or for none. */
  left(worker: number): void {
    this.#underWay.left(worker);
    for (const held of this.#held) held.knownAtMs = Number.NEGATIVE_INFINITY;
  }

  /** The next request that can be given to a worker now, if there is one; to be asked until there is none. */
  take(statesFor: StatesFor, nowMs: number, random: Random): Assignment<T> | undefined {
    const { knownMs = usualKnownMs } = this.#options;
    const look = new Look(this.#options.openS, this.#held.length, nowMs);
    for (const held of this.#first(nowMs)) {
      // The first one is always asked for: it tells the loads, too.
      if (nowMs - held.knownAtMs > knownMs || !look.knowsAll(held)) know(held, statesFor, nowMs, look, this.#underWay);
      if (!look.mayOpen(held)) continue;
      let best = look.best(held, random);
      let idle = held.hasPaid ? undefined : look.idleBeside(held, best, random);
      if ((idle !== undefined || look.isOpen(held, best)) && held.knownAtMs < nowMs) {
        know(held, statesFor, nowMs, look, this.#underWay);
        if (held.workers.length === 0) continue;
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
      held.roomSinceMs = open === undefined ? undefined : (held.roomSinceMs ?? nowMs);
      // Of those who wait for room nobody knows how long: at most twice is paid what who knows it pays (as in `rent-or-buy.ts`).
      if (open !== undefined && nowMs - held.roomSinceMs! >= look.priceForAllS(held, open, best) * 1000) best = open;
      if (look.isOpen(held, best) && !this.#keepsFree(look, held, best, nowMs)) {
        this.#gives(look, held, best, nowMs);
        return { item: held.item, worker: best, held: held.known[best]! };
      }
      look.claim(held, best);
    }
    return undefined;
  }

  #gives(look: Look, held: Held<T>, worker: number, nowMs: number): void {
    const { request, workers } = held;
    this.remove(held.item);
    const { seconds, lastStepS } = look.takes(held, worker);
    if (2 * held.known[worker]!.match.blocks < request.keys.length) {
      this.#underWay.given(request.keys, worker, nowMs, seconds * 1000, lastStepS * 1000);
    }
    this.#workers = workers.length;
    const loads = workers.map((number) => look.loads[number]!);
    this.#longest.begins(request.maxTokens, loads, nowMs);
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

  /** Who must begin now, or it is under way alone after all others: the longest answer, and where nobody comes any more the longest prompt. */
  #mustBegin(nowMs: number): Held<T> | undefined {
    const answer = longest(this.#held, ({ request }) => request.maxTokens);
    if (answer === undefined) return undefined;
    if (this.#longest.mustBegin(answer.request.maxTokens, this.#queuedMs / this.#workers, nowMs)) return answer;
    if (!this.#arrivals.haveEnded(nowMs)) return undefined;
    const prompt = longest(this.#held, ({ promptMs }) => promptMs)!;
    return prompt.promptMs > (this.#queuedMs - prompt.promptMs) / this.#workers ? prompt : undefined;
  }

  /** Those that a look considers: who must begin now, then the largest response ratio first; of equal ones, who came first. */
  #first(nowMs: number): Held<T>[] {
    const first: Held<T>[] = [];
    const ratios: number[] = [];
    const now = this.#mustBegin(nowMs);
    for (const held of this.#held) {
      const ratio = held === now ? Number.POSITIVE_INFINITY : (nowMs - held.sinceMs) / held.needsMs;
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

function longest<T>(held: readonly Held<T>[], of: (held: Held<T>) => number): Held<T> | undefined {
  let first: Held<T> | undefined;
  for (const one of held) if (first === undefined || of(one) > of(first)) first = one;
  return first;
}
