/**
 * The coordinator's queue in front of our own policy: a request is given to a worker when that worker is about to have
 * nothing to do, and not before. While it waits here it can still go anywhere; a request in a worker's own queue cannot.
 *
 *   - A worker is open while its work ahead is below `openS` and it has room for the request.
 *   - Requests are looked at by their response ratio, (waited + needs) ÷ needs, the largest first (HRRN: Brinch Hansen
 *     1971): short ones soon, long ones surely.
 *   - Each takes the worker that serves it soonest, counting what those before it have claimed. If that worker is open it
 *     goes there; if not it keeps waiting, and claims its place.
 *
 * Without a queue, this is the policy itself: the first look sends the request. Bounded: beyond `maxHeld` nothing is taken.
 */
import { aheadS, costOf, roomS, workS } from './policies/predicted.ts';
import { eligible, leastBy, type Random, type RoutedRequest, type WorkerState } from './policy.ts';

export interface LateBindingOptions {
  /** Work that a worker has ahead at most when it gets more. */
  readonly openS: number;
  /** Requests that wait at most. */
  readonly maxHeld: number;
  /** Requests that one look considers at most. */
  readonly maxLooked: number;
}

export const lateBindingDefaults: LateBindingOptions = { openS: 0.2, maxHeld: 4096, maxLooked: 64 };

interface Held<T> {
  readonly item: T;
  readonly request: RoutedRequest;
  readonly sinceMs: number;
  readonly needsMs: number;
}

export interface Assignment<T> {
  readonly item: T;
  readonly worker: number;
}

/** What is known of every worker for one request. */
export type StatesFor = (request: RoutedRequest) => readonly (WorkerState | undefined)[];

export class LateBinding<T> {
  readonly #options: LateBindingOptions;
  #held: Held<T>[] = [];

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
    this.#held.push({ item, request, sinceMs: nowMs, needsMs: Math.max(needsMs, 1) });
  }

  /** The request goes, served or not. */
  remove(item: T): void {
    this.#held = this.#held.filter((held) => held.item !== item);
  }

  /** The next request that can be given to a worker now, if there is one; to be asked until there is none. */
  take(statesFor: StatesFor, nowMs: number, random: Random): Assignment<T> | undefined {
    const claims: number[] = [];
    const order = this.#held.map((held) => ({ held, ratio: (nowMs - held.sinceMs) / held.needsMs }));
    order.sort((a, b) => b.ratio - a.ratio);
    for (const { held } of order.slice(0, this.#options.maxLooked)) {
      const states = statesFor(held.request);
      const workers = eligible(states);
      const claimOf = (worker: number): number => claims[worker] ?? 0;
      const isOpen = (worker: number): boolean =>
        aheadS(states[worker]!) + claimOf(worker) < this.#options.openS && roomS(held.request, states[worker]!) === 0;
      if (!workers.some(isOpen)) continue;
      const crowd = 1 + this.#held.length / workers.length / 2;
      const best = leastBy(workers, random, (worker) => {
        // Work on a worker that has none is waited for by nobody.
        const idle = aheadS(states[worker]!) + claimOf(worker) === 0;
        return costOf(held.request, states[worker]!, claimOf(worker), idle ? 1 : crowd);
      });
      if (isOpen(best)) {
        this.remove(held.item);
        return { item: held.item, worker: best };
      }
      claims[best] = claimOf(best) + workS(held.request, states[best]!);
    }
    return undefined;
  }
}
