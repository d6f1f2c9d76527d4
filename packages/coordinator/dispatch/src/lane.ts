/**
 * One model's workers, as the policy sees them: a state object a worker, filled again for every decision and never made anew.
 */
import { maxMedia } from '@kvtier/kv-index';
import {
  aheadS,
  LateBinding,
  type LateBindingOptions,
  opensAtS,
  type Policy,
  type PolicyName,
  policies,
} from '@kvtier/routing';
import type { Pending } from './pending.ts';
import type { Held, Holdings, Workers } from './ports.ts';

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
  readonly waiters = new Set<Pending>();
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

  constructor(model: string, policy: PolicyName, late: LateBindingOptions, source: Workers) {
    this.model = model;
    this.#source = source;
    this.policy = policies[policy]();
    this.#openS = late.openS;
    this.queue = policy === 'predicted' ? new LateBinding<Pending>(late) : undefined;
  }

  /** Its workers from now on. */
  become(numbers: readonly number[]): void {
    const isSame = numbers.length === this.numbers.length && numbers.every((number, i) => number === this.numbers[i]);
    if (isSame) return;
    for (const number of this.numbers) this.#view[number] = undefined;
    this.numbers.splice(0, this.numbers.length, ...numbers);
    this.#version++;
  }

  /** Reads the workers' loads. */
  refresh(): void {
    const workers = this.#source.workers();
    const nowMs = performance.now();
    let known = 0;
    let sum = 0;
    for (let i = 0; i < this.numbers.length; i++) {
      const { load, facts } = workers[this.numbers[i]!]!;
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
      if (!(load.prefillTokensPerS > 0)) continue;
      known++;
      sum += load.prefillTokensPerS;
    }
    const usual = known === 0 ? unmeasuredTokensPerS : sum / known;
    for (let i = 0; i < this.numbers.length; i++) {
      const state = this.#states[i]!;
      if (!(state.prefillTokensPerS > 0)) state.prefillTokensPerS = usual;
    }
  }

  /** Some worker has less ahead than it needs to stay busy. After `refresh`. */
  get isOpen(): boolean {
    for (let i = 0; i < this.numbers.length; i++) {
      const state = this.#states[i]!;
      if (aheadS(state) <= opensAtS(state, this.#openS)) return true;
    }
    return false;
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
    const workers = this.#source.workers();
    for (const number of this.numbers) if (pending.allows(workers[number]!)) return true;
    return false;
  }

  /** Whether some worker would be chosen for it, had other files made its tokens. After `hasFor` was false. */
  readsOtherwise(pending: Pending): boolean {
    const workers = this.#source.workers();
    return this.numbers.some((number) => pending.names(workers[number]!) && !pending.isReadBy(workers[number]!));
  }

  /** By number, for one request; those that it may not have are undefined. Valid until the next call. After `refresh`. */
  viewFor(pending: Pending, holdings: Holdings, nowMs: number): readonly (State | undefined)[] {
    const matches = this.#matchesOf(pending, holdings, nowMs);
    const workers = this.#source.workers();
    const view = this.#view;
    for (let i = 0; i < this.numbers.length; i++) {
      const number = this.numbers[i]!;
      if (!pending.allows(workers[number]!)) {
        view[number] = undefined;
        continue;
      }
      const state = this.#states[i]!;
      const match = matches[i] ?? nothing;
      state.match = match;
      state.remoteBlocks = match.remoteBlocks ?? 0;
      state.remoteMedium = match.remoteMedium ?? 0;
      view[number] = state;
    }
    return view;
  }

  #matchesOf(pending: Pending, holdings: Holdings, nowMs: number): readonly Held[] {
    if (!pending.isMatched(this.#version, nowMs)) {
      const { keys } = pending;
      pending.matched(this.#version, nowMs, keys.length === 0 ? [] : holdings.match(this.model, keys, this.numbers));
    }
    return pending.matches;
  }
}
