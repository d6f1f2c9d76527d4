/**
 * Which worker gets a request now: the workers that are ready, what the KV index says that each holds, and a policy.
 *
 *     request ─► lane of its model ─► policy ─► worker          (policies that choose at once; a model with one worker)
 *                     └► queue ─► a worker is about to have nothing to do ─► worker    (`predicted`: late-binding.ts)
 *
 * Nothing is asked in turns: the queue is looked at when a worker's load or state changed and when a request ended (`queue-looks.ts`).
 *
 * Invariants: a request is given only to a worker that is ready, serves its model, is allowed by `among` and `except`, and reads its
 * tokens as they were meant (`textDigest`); it is counted on that worker from the choice on until `ended`, once; the queue is bounded,
 * and nobody waits in it beyond `maxWaitMs`.
 */
import { KvError } from '@kvtier/errors';
import {
  type Assignment,
  type LateBindingOptions,
  lateBindingDefaults,
  type PolicyName,
  type Random,
  type RoutedRequest,
  type WorkerState,
  workS,
} from '@kvtier/routing';
import type { Choice, Dispatch, DispatchRequest } from './choice.ts';
import { Chosen, shareOf } from './chosen.ts';
import type { Lane } from './lane.ts';
import { Lanes, nobodyFor, tooLongFor } from './lanes.ts';
import { Outdated } from './outdated.ts';
import { Pending } from './pending.ts';
import type { Holdings, Workers } from './ports.ts';
import { afterFirst, type Looked, QueueLooks } from './queue-looks.ts';
import { Saturated } from './saturated.ts';

export interface DispatcherOptions {
  readonly workers: Workers;
  readonly holdings: Holdings;
  readonly policy?: PolicyName;
  readonly late?: LateBindingOptions;
  /** Longest wait in the queue. */
  readonly maxWaitMs?: number;
  readonly random?: Random;
  /** Workers that compute prompts for others serve whole requests while no other worker of their model is ready; default true. */
  readonly prefillServes?: boolean;
}

export interface DispatchStats {
  readonly policy: PolicyName;
  /** Requests that wait in the queues. */
  readonly waiting: number;
  /** Requests that were given to a worker and have not ended. */
  readonly given: number;
  /** Choices so far; requests that were told to come again. */
  readonly chosen: number;
  readonly saturated: number;
  /** Memory of what the policy keeps of its own. */
  readonly policyBytes: number;
}

/** How often workers may turn to another role under one request that waits. */
const maxTurns = 8;

export class Dispatcher implements Dispatch {
  readonly #workers: Workers;
  readonly #holdings: Holdings;
  readonly #policy: PolicyName;
  readonly #maxWaitMs: number;
  readonly #random: Random;
  readonly #lanes: Lanes;
  readonly #looks: QueueLooks;
  readonly #stopListening: () => void;
  #waiting = 0;
  #given = 0;
  #chosen = 0;
  #saturated = 0;
  #closed = false;

  constructor(options: DispatcherOptions) {
    this.#workers = options.workers;
    this.#holdings = options.holdings;
    this.#policy = options.policy ?? 'predicted';
    this.#maxWaitMs = options.maxWaitMs ?? 30_000;
    this.#random = options.random ?? Math.random;
    this.#lanes = new Lanes({
      workers: options.workers,
      policy: this.#policy,
      late: options.late ?? lateBindingDefaults,
      prefillServes: options.prefillServes ?? true,
    });
    this.#looks = new QueueLooks({
      isWanted: () => this.#waiting > 0,
      glance: () => this.#glance(),
      look: (isOver) => this.#look(isOver),
    });
    const stops = [
      this.#workers.onLoad(() => this.#looks.wake()),
      this.#workers.onChange(() => {
        this.#lanes.changed();
        this.#looks.wake();
      }),
    ];
    this.#stopListening = () => {
      for (const stop of stops) stop();
    };
  }

  stats(): DispatchStats {
    return {
      policy: this.#policy,
      waiting: this.#waiting,
      given: this.#given,
      chosen: this.#chosen,
      saturated: this.#saturated,
      policyBytes: [...this.#lanes].reduce((bytes, { policy }) => bytes + (policy.bytes ?? 0), 0),
    };
  }

  async choose(request: DispatchRequest, signal: AbortSignal): Promise<Choice> {
    try {
      return await this.#chooseLeaning(request, signal);
    } catch (error) {
      const isNobody = error instanceof KvError && (error.code === 'DISCONNECTED' || error.code === 'TOO_LONG');
      if (signal.aborted || this.#closed || request.wantedTokens === undefined || !isNobody) throw error;
      // Those whose pools hold all of its answer are not there: one that ends early is better than none.
      return this.#chooseLeaning({ ...request, wantedTokens: undefined }, signal);
    }
  }

  async #chooseLeaning(request: DispatchRequest, signal: AbortSignal): Promise<Choice> {
    let asked = request;
    for (let leftTurns = maxTurns; ; leftTurns--) {
      try {
        return await this.#choose(asked, signal);
      } catch (error) {
        // Nobody is turned away because of what workers lean to, not even while they turn.
        if (signal.aborted || this.#closed || request.role !== undefined || leftTurns === 0) throw error;
        if (!(error instanceof KvError) || error.code !== 'DISCONNECTED') throw error;
        const leaning = this.#lanes.leaningToPrefill(request);
        if (leaning.size === 0 && asked === request) throw error;
        asked = asked === request ? { ...request, role: 'prefill', among: leaning } : request;
      }
    }
  }

  async #choose(request: DispatchRequest, signal: AbortSignal): Promise<Choice> {
    if (signal.aborted) throw signal.reason;
    if (this.#closed) throw closing();
    this.#lanes.sync();
    const lane = this.#lanes.of(request);
    const pending = new Pending(request, lane?.answers.expected(request.maxTokens) ?? request.maxTokens);
    if (lane === undefined || !lane.hasFor(pending)) throw this.#whyNobody(pending, lane);
    const nowMs = performance.now();
    lane.refresh();
    const view = lane.viewFor(pending, this.#holdings, nowMs);
    if (lane.queue === undefined || (lane.numbers.length === 1 && lane.queue.size === 0)) {
      const number = lane.policy.choose(pending, view, nowMs, this.#random);
      return this.#give(lane, pending, view[number] === undefined ? firstOf(view) : number, nowMs);
    }
    if (lane.queue.isFull) throw this.#saturatedBy(lane, `${lane.queue.size} requests wait already`);
    const isLate = request.firstTokenByMs !== undefined && nowMs + lane.expectedS * 1000 > request.firstTokenByMs;
    if (isLate && !lane.hasTime) throw this.#saturatedBy(lane, 'its first token would come later than it is wanted');
    pending.needsS = leastWorkS(pending, view);
    const isFirst = lane.queue.size === 0;
    this.#enter(lane, pending, nowMs, mostHeldBlocks(view));
    const next = isFirst ? lane.queue.take(() => view, nowMs, this.#random) : undefined;
    if (next !== undefined) {
      this.#left(lane, pending);
      return this.#give(lane, pending, next.worker, nowMs, next.held);
    }
    this.#looks.wake();
    return this.#wait(lane, pending, signal);
  }

  /** Those that wait are told so; nothing is chosen any more. */
  close(): void {
    this.#closed = true;
    this.#stopListening();
    this.#looks.close();
    for (const lane of this.#lanes) for (const pending of [...lane.waiters]) this.#reject(lane, pending, closing());
  }

  #wait(lane: Lane, pending: Pending, signal: AbortSignal): Promise<Choice> {
    return new Promise((resolve, reject) => {
      const settle = (outcome: Choice | Error): void => {
        clearTimeout(timer);
        signal.removeEventListener('abort', leave);
        pending.settle = undefined;
        if (outcome instanceof Error) reject(outcome);
        else resolve(outcome);
      };
      const leaveWith = (why: Error): void => this.#reject(lane, pending, why);
      const leave = (): void => leaveWith(signal.reason as Error);
      const { firstTokenByMs = Number.POSITIVE_INFINITY } = pending.request;
      const waitMs = Math.min(this.#maxWaitMs, Math.max(firstTokenByMs - performance.now(), 1));
      const timer = setTimeout(() => {
        this.#lanes.sync(); // a worker may have left since the last look
        if (!lane.hasFor(pending)) return leaveWith(this.#whyNobody(pending, lane));
        lane.refresh();
        const why = waitMs < this.#maxWaitMs ? 'before its first token was wanted' : `within ${waitMs / 1000} s`;
        leaveWith(this.#saturatedBy(lane, `no worker had room ${why}`));
      }, waitMs);
      signal.addEventListener('abort', leave, { once: true });
      pending.settle = settle;
      lane.waiters.add(pending);
    });
  }

  #enter(lane: Lane, pending: Pending, nowMs: number, heldBlocks: number): void {
    lane.queue!.add(pending, pending, nowMs, pending.needsS * 1000, heldBlocks);
    lane.queuedS += pending.needsS;
    this.#waiting++;
  }

  /** It is out of the lane's queue. */
  #left(lane: Lane, pending: Pending): void {
    lane.queuedS = lane.queue!.size === 0 ? 0 : lane.queuedS - pending.needsS;
    this.#waiting--;
    lane.waiters.delete(pending);
    this.#lanes.emptied(lane);
  }

  /** `held`: what the worker will hold of its prompt when it comes to it, if that is known better than by the index. */
  #give(lane: Lane, pending: Pending, number: number, nowMs: number, held?: Assignment<Pending>['held']): Choice {
    const state = lane.stateFor(pending, number, this.#holdings, nowMs);
    const share = shareOf(pending, state, held);
    const sent = this.#workers.sent(number, share);
    this.#given++;
    this.#chosen++;
    if (pending.keys.length > 0) this.#holdings.sent?.(lane.model, number, pending.keys);
    lane.policy.sent?.(pending, number, nowMs);
    const { model, numbers, policy } = lane;
    // A prompt without a whole block is held by nobody, and some policies do not ask who holds it.
    const isAsked = numbers.length > 1 && pending.keys.length > 0 && policy.asksIndex === true;
    const by = { policy: policy.name, isGuessed: isAsked && this.#holdings.guesses?.(model, numbers) === true };
    return new Chosen(this.#workers.workers()[number]!, by, pending, state, share, {
      firstToken: (isTimed) => {
        sent.firstToken(isTimed);
        this.#looks.wake();
      },
      ended: (tokens, hasFirstToken) => {
        this.#given--;
        if (tokens !== undefined) lane.answers.ended(tokens);
        lane.queue?.ended(pending, hasFirstToken);
        sent.ended();
        this.#looks.wake();
      },
    });
  }

  /** Some worker is open that was not at the last look, or some that wait are to be told of a change. */
  #glance(): boolean {
    this.#lanes.sync();
    let isNews = false;
    for (const lane of this.#lanes)
      if (lane.queue !== undefined && lane.queue.size > 0 && (lane.glance() || !lane.waiters.isChecked)) isNews = true;
    return isNews;
  }

  /** After a glance. */
  #look(isOver: () => boolean): Looked {
    const nowMs = performance.now();
    let hasGiven = false;
    let isCut = false;
    let isMidway = false;
    for (const lane of this.#lanes) {
      const { queue, waiters } = lane;
      if (queue === undefined) continue;
      for (const pending of waiters.lost(isOver)) this.#reject(lane, pending, this.#whyNobody(pending, lane));
      const viewFor = (one: RoutedRequest) => lane.viewFor(one as Pending, this.#holdings, nowMs);
      const limits = { mayGo: (one: RoutedRequest) => lane.mayGo(one as Pending), isOver: afterFirst(isOver) };
      if (!lane.isOpen) queue.closed(nowMs);
      lane.looks();
      while (queue.size > 0 && lane.isOpen) {
        const next = queue.take(viewFor, nowMs, this.#random, limits);
        if (next === undefined) break;
        this.#left(lane, next.item);
        next.item.settle!(this.#give(lane, next.item, next.worker, nowMs, next.held));
        hasGiven = true;
        lane.refreshOne(next.worker);
      }
      if (queue.isMidway || !waiters.isChecked) isMidway = true;
      if ((queue.isMidway && lane.isOpen) || !waiters.isChecked) isCut = true;
    }
    return { hasGiven, isCut, isMidway };
  }

  #reject(lane: Lane, pending: Pending, why: Error): void {
    lane.queue!.remove(pending);
    this.#left(lane, pending);
    pending.settle!(why);
  }

  #whyNobody(pending: Pending, lane: Lane | undefined): KvError {
    if (lane?.readsOtherwise(pending)) return new Outdated(lane.model);
    return (lane && tooLongFor(pending, lane, this.#workers.workers())) ?? nobodyFor(pending.request, lane);
  }

  #saturatedBy(lane: Lane, why: string): Saturated {
    this.#saturated++;
    return new Saturated(`model ${lane.model}: all its workers are saturated: ${why}; try again later`, lane.expectedS);
  }
}

function leastWorkS(pending: Pending, view: readonly (WorkerState | undefined)[]): number {
  let least = Number.POSITIVE_INFINITY;
  for (const state of view) if (state !== undefined) least = Math.min(least, workS(pending, state));
  return least;
}

/** That one worker's GPU has of it. */
function mostHeldBlocks(view: readonly (WorkerState | undefined)[]): number {
  let most = 0;
  for (const state of view) if (state !== undefined) most = Math.max(most, state.match.byMedium[0]!);
  return most;
}

const firstOf = (view: readonly (WorkerState | undefined)[]): number => view.findIndex((state) => state !== undefined);

const closing = (): KvError => new KvError('DISCONNECTED', 'the coordinator is closing; try again', { retry: true });
