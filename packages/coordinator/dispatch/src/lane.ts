/**
 * One model's workers, as the policy sees them: a state object a worker, filled again for every decision and never made anew.
 */
import { maxMedia } from '@kvtier/kv-index';
import {
  AnswerLengths,
  computeAheadS,
  LateBinding,
  type LateBindingOptions,
  opensAtS,
  type Policy,
  type PolicyName,
  policies,
  roomForS,
} from '@kvtier/routing';
import { Numbers } from './numbers.ts';
import type { Pending } from './pending.ts';
import type { Held, Holdings, Workers } from './ports.ts';
import { Waiters } from './waiters.ts';

/** Of a worker that has not measured, while no other has. */
const unmeasuredTokensPerS = 4_000;

const nothing: Held = { blocks: 0, byMedium: new Int32Array(maxMedia) };

/** WorkerState of @kvtier/routing, to be written. */
class State {
  waiting = 0;
  running = 0;
  tokensAhead = 0;
  stepTokens = 0;
  stepForS: number | undefined = undefined;
  usedBlocks = 0;
  totalBlocks = 0;
  waitingBlocks = 0;
  freedBlocksPerS = 0;
  maxRunning: number | undefined = undefined;
  maxStepTokens: number | undefined = undefined;
  loadAheadS = 0;
  prefillTokensPerS = unmeasuredTokensPerS;
  stepS = 0;
  stepPerRequestS = 0;
  loadBlocksPerS: readonly number[] = [];
  match = nothing;
  remoteBlocks = 0;
  remoteMedium = 0;
}

export class Lane {
  readonly model: string;
  readonly policy: Policy;
  /** Requests that wait in front of the workers; undefined: this policy sends at once. */
  readonly queue: LateBinding<Pending> | undefined;
  /** Of these, those whose choice is waited for. */
  readonly waiters: Waiters;
  readonly answers = new AnswerLengths();
  readonly #openS: number;
  readonly #source: Workers;
  /** Numbers of the workers that take requests, ascending. */
  readonly numbers: number[] = [];
  /** Workers of this model that are there but take nothing now. */
  absent = 0;
  /** Workers that are ready, and compute prompts for others only. */
  prefillOnly = 0;
  /** Seconds of work that waits in the queue. */
  queuedS = 0;
  /** Another one after each change of `numbers`. */
  #version = 0;
  readonly #states: State[] = [];
  readonly #view: (State | undefined)[] = [];
  /** Where in `numbers` each number is. */
  #places: number[] = [];
  /** Workers that are open, as their loads were read last; and those of them that were at the last look. */
  readonly #open = new Numbers();
  readonly #seenOpen = new Numbers();

  constructor(model: string, policy: PolicyName, late: LateBindingOptions, source: Workers) {
    this.model = model;
    this.#source = source;
    this.policy = policies[policy]();
    this.#openS = late.openS;
    this.queue = policy === 'predicted' ? new LateBinding<Pending>(late) : undefined;
    this.waiters = new Waiters((pending, number) => pending.allows(source.workers()[number]!));
  }

  /** Its workers from now on; `changed`: those of all that came, left, or are other ones than before. */
  become(numbers: readonly number[], changed: readonly number[]): void {
    if (this.waiters.become(numbers, changed)) {
      this.queue?.changed();
      this.#seenOpen.clear();
    }
    if (this.policy.named !== undefined)
      for (const number of numbers) this.policy.named(number, this.#source.workers()[number]!.record.name);
    const isSame = numbers.length === this.numbers.length && numbers.every((number, i) => number === this.numbers[i]);
    if (isSame) return;
    for (const number of this.numbers) this.#view[number] = undefined;
    this.numbers.splice(0, this.numbers.length, ...numbers);
    this.#places = [];
    for (const [i, number] of numbers.entries()) this.#places[number] = i;
    this.#open.clear();
    this.#version++;
  }

  /** Reads the workers' loads. */
  refresh(): void {
    const nowMs = performance.now();
    let known = 0;
    let sum = 0;
    for (let i = 0; i < this.numbers.length; i++) {
      const { prefillTokensPerS } = this.#read(i, nowMs);
      if (!(prefillTokensPerS > 0)) continue;
      known++;
      sum += prefillTokensPerS;
    }
    const usual = known === 0 ? unmeasuredTokensPerS : sum / known;
    for (let i = 0; i < this.numbers.length; i++) {
      const state = this.#states[i]!;
      if (!(state.prefillTokensPerS > 0)) state.prefillTokensPerS = usual;
    }
  }

  /** Reads the load of this worker alone: something was given to it. After `glance`. */
  refreshOne(number: number): void {
    const i = this.#places[number]!;
    const { prefillTokensPerS } = this.#states[i]!;
    const state = this.#read(i, performance.now());
    if (!(state.prefillTokensPerS > 0)) state.prefillTokensPerS = prefillTokensPerS;
    this.#opens(i);
  }

  #read(i: number, nowMs: number): State {
    const { load, facts } = this.#source.workers()[this.numbers[i]!]!;
    this.#states[i] ??= new State();
    const state = this.#states[i]!;
    state.waiting = load.waiting;
    state.running = load.running;
    state.tokensAhead = load.tokensAhead;
    state.stepTokens = load.stepTokens;
    state.stepForS = load.stepBegunAtMs > 0 ? (nowMs - load.stepBegunAtMs) / 1_000 : undefined;
    state.usedBlocks = load.usedBlocks;
    state.waitingBlocks = load.waitingBlocks;
    state.totalBlocks = facts?.totalBlocks ?? 0;
    state.maxRunning = facts?.maxRunning;
    state.maxStepTokens = facts?.maxStepTokens;
    state.freedBlocksPerS = load.freedBlocksPerS;
    state.loadAheadS = load.loadAheadS;
    state.prefillTokensPerS = load.prefillTokensPerS;
    state.stepS = load.stepS;
    state.stepPerRequestS = load.stepPerRequestS;
    state.loadBlocksPerS = load.loadBlocksPerS;
    return state;
  }

  /** Whether it is open: nobody that waits can be given to a worker without time, or without room for the smallest of them. */
  #opens(i: number): void {
    const state = this.#states[i]!;
    const leastBlocks = this.queue?.leastBlocks;
    const isOpen = this.#hasTime(state) && (leastBlocks === undefined || roomForS(leastBlocks, state) === 0);
    const number = this.numbers[i]!;
    this.#open.set(number, isOpen);
    if (!isOpen) this.#seenOpen.set(number, false);
  }

  readonly #hasTime = (state: State): boolean => computeAheadS(state) <= opensAtS(state, this.#openS);

  /** Some worker has less ahead than it needs to stay busy. After `refresh`. */
  get hasTime(): boolean {
    return this.#states.slice(0, this.numbers.length).some(this.#hasTime);
  }

  /** Some worker could take one of those that wait. After `glance`. */
  get isOpen(): boolean {
    return !this.#open.isEmpty;
  }

  /** Reads the workers' loads; true: some worker is open that was not at the last look, or has been closed since. */
  glance(): boolean {
    this.refresh();
    for (let i = 0; i < this.numbers.length; i++) this.#opens(i);
    return this.#open.exceeds(this.#seenOpen);
  }

  /** Those that wait are looked at, for all workers that are open. After `glance`. */
  looks(): void {
    this.#seenOpen.copy(this.#open);
  }

  /** Some worker that the request may have is open, as far as is known of it. After `glance`. */
  mayGo(pending: Pending): boolean {
    return pending.allowed.meets(this.#open);
  }

  /** Seconds until the first worker has done what it has, and what waits here. After `refresh`. */
  get expectedS(): number {
    let least = Number.POSITIVE_INFINITY;
    for (let i = 0; i < this.numbers.length; i++) {
      const { tokensAhead, prefillTokensPerS, loadAheadS } = this.#states[i]!;
      least = Math.min(least, Math.max(tokensAhead / prefillTokensPerS, loadAheadS));
    }
    return (Number.isFinite(least) ? least : 0) + this.queuedS / Math.max(this.numbers.length, 1);
  }

  /** Whether some worker may be chosen for the request. */
  hasFor(pending: Pending): boolean {
    return !this.waiters.allowedOf(pending).isEmpty;
  }

  /** Whether some worker would be chosen for it, had other files made its tokens. After `hasFor` was false. */
  readsOtherwise(pending: Pending): boolean {
    const workers = this.#source.workers();
    return this.numbers.some((number) => pending.names(workers[number]!) && !pending.isReadBy(workers[number]!));
  }

  /** By number, for one request; those that it may not have are undefined. Valid until the next call. After `refresh`. */
  viewFor(pending: Pending, holdings: Holdings, nowMs: number): readonly (State | undefined)[] {
    const matches = this.#matchesOf(pending, holdings, nowMs);
    const allowed = this.waiters.allowedOf(pending);
    const view = this.#view;
    for (let i = 0; i < this.numbers.length; i++) {
      const number = this.numbers[i]!;
      view[number] = allowed.has(number) ? this.#holds(i, matches) : undefined;
    }
    return view;
  }

  /** The same of one worker, that it may have. */
  stateFor(pending: Pending, number: number, holdings: Holdings, nowMs: number): State {
    return this.#holds(this.#places[number]!, this.#matchesOf(pending, holdings, nowMs));
  }

  #holds(i: number, matches: readonly Held[]): State {
    const state = this.#states[i]!;
    const match = matches[i] ?? nothing;
    state.match = match;
    state.remoteBlocks = match.remoteBlocks ?? 0;
    state.remoteMedium = match.remoteMedium ?? 0;
    return state;
  }

  #matchesOf(pending: Pending, holdings: Holdings, nowMs: number): readonly Held[] {
    if (!pending.isMatched(this.#version, nowMs)) {
      const { keys } = pending;
      pending.matched(this.#version, nowMs, keys.length === 0 ? [] : holdings.match(this.model, keys, this.numbers));
    }
    return pending.matches;
  }
}
