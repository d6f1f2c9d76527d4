/**
 * Who takes requests now: a lane for the workers of each model that serve whole requests, and one for those that compute prompts for
 * others. Follows the fleet: what workers are, whether they are ready, and what those of both roles lean to.
 */
import { KvError } from '@kvtier/errors';
import type { Worker } from '@kvtier/registry';
import type { LateBindingOptions, PolicyName } from '@kvtier/routing';
import type { DispatchRequest } from './choice.ts';
import { Lane } from './lane.ts';
import type { Pending } from './pending.ts';
import type { Workers } from './ports.ts';

export interface LanesOptions {
  readonly workers: Workers;
  readonly policy: PolicyName;
  readonly late: LateBindingOptions;
  /** Workers that compute prompts for others serve whole requests while no other worker of their model is ready. */
  readonly prefillServes: boolean;
}

export class Lanes {
  readonly #options: LanesOptions;
  readonly #lanes = new Map<string, Lane>();
  /** By number, when it was last looked. */
  readonly #seen: (Pick<Worker, 'record' | 'state' | 'facts' | 'leaning'> | undefined)[] = [];
  #isStale = true;

  constructor(options: LanesOptions) {
    this.#options = options;
  }

  [Symbol.iterator](): Iterator<Lane> {
    return this.#lanes.values();
  }

  of({ model, role }: Pick<DispatchRequest, 'model' | 'role'>): Lane | undefined {
    return this.#lanes.get(laneOf(model, role));
  }

  /** A worker is another one than before. */
  changed(): void {
    this.#isStale = true;
  }

  /** Takes over who is there, if anything changed. */
  sync(): void {
    if (!this.#isStale) return;
    this.#isStale = false;
    const workers = this.#options.workers.workers();
    const changed = this.#changed(workers);
    if (changed.length === 0) return;
    const numbers = new Map<string, number[]>();
    const absent = new Map<string, number>();
    const idle = new Map<string, number>();
    const models = new Map<string, string>();
    for (const [number, worker] of workers.entries()) {
      const model = worker?.facts?.model;
      if (worker === undefined || model === undefined) continue;
      for (const role of ['prefill', undefined] as const) {
        if (!serves(worker, role)) continue;
        const key = laneOf(model, role);
        models.set(key, model);
        if (takesRequests(worker)) append(numbers, key, number);
        else absent.set(key, (absent.get(key) ?? 0) + 1);
      }
    }
    for (const [key, model] of [...models]) {
      const whole = laneOf(model, undefined);
      const its = numbers.get(key) ?? [];
      // Those that only lean to prefill are asked first (`choose`).
      if (key === whole || numbers.has(whole) || its.some((number) => workers[number]!.record.role === 'both'))
        continue;
      models.set(whole, model);
      if (this.#options.prefillServes && its.length > 0) numbers.set(whole, its);
      else idle.set(whole, its.length);
    }
    const { policy, late, workers: source } = this.#options;
    for (const [key, model] of models)
      if (!this.#lanes.has(key)) this.#lanes.set(key, new Lane(model, policy, late, source));
    for (const [key, lane] of this.#lanes) {
      lane.absent = absent.get(key) ?? 0;
      lane.prefillOnly = idle.get(key) ?? 0;
      lane.become(numbers.get(key) ?? [], changed);
      if (isOver(lane)) this.#lanes.delete(key);
    }
  }

  /** Nobody waits in it any more. */
  emptied(lane: Lane): void {
    if (!isOver(lane)) return;
    for (const [key, one] of this.#lanes) if (one === lane) this.#lanes.delete(key);
  }

  /** Of which something else than the load is another one. Policies are told of numbers that stand for another worker, or for none. */
  #changed(workers: readonly (Worker | undefined)[]): number[] {
    const changed: number[] = [];
    for (let number = 0; number < Math.max(workers.length, this.#seen.length); number++) {
      const worker = workers[number];
      const seen = this.#seen[number];
      const isSame = worker?.record === seen?.record && worker?.state === seen?.state && worker?.facts === seen?.facts;
      if (isSame && worker?.leaning === seen?.leaning) continue;
      changed.push(number);
      const isOther = seen !== undefined && seen.record.name !== worker?.record.name;
      // Away or another one: what it was computing, it does not go on with.
      const isAway = seen?.state === 'ready' && worker?.state !== 'ready';
      for (const lane of this.#lanes.values()) {
        if (isOther) lane.policy.left?.(number);
        if (isOther || isAway) lane.queue?.left(number);
      }
      const { record, state, facts, leaning } = worker ?? {};
      this.#seen[number] = record && { record, state: state!, facts, leaning };
    }
    return changed;
  }

  /** Of both roles, and allowed: who would take it if nobody else does. */
  leaningToPrefill({ model, among, except }: DispatchRequest): Set<string> {
    const names = new Set<string>();
    for (const worker of this.#options.workers.workers()) {
      if (worker?.facts?.model !== model || worker.record.role !== 'both' || worker.leaning !== 'prefill') continue;
      const { name } = worker.record;
      if (takesRequests(worker) && !except.has(name) && (among?.has(name) ?? true)) names.add(name);
    }
    return names;
  }
}

/** No worker is there of it, and nobody waits to be told so. */
const isOver = ({ numbers, absent, prefillOnly, waiters }: Lane): boolean =>
  numbers.length + absent + prefillOnly + waiters.size === 0;

/** Why nobody can be chosen for it. */
export function nobodyFor({ model, among, except }: DispatchRequest, lane: Lane | undefined): KvError {
  const ready = lane?.numbers.length ?? 0;
  const why =
    ready === 0
      ? `no ${lane?.prefillOnly ? 'decode worker' : 'worker'} is ready to serve it (${lane?.absent ?? 0} are joining, draining or silent${lane?.prefillOnly ? `, ${lane.prefillOnly} only prefill, and handoff.fallback is off` : ''})`
      : `none of its ${ready} workers may be chosen${among === undefined ? '' : ' of those named'}${except.size === 0 ? '' : `, after ${except.size} failed`}`;
  return new KvError('DISCONNECTED', `model ${model}: ${why}; try again`, { retry: true });
}

/**
 * Somebody is ready, and none of all that it may have, whoever is away or failed on it, has a pool that holds it: no use to come again.
 * undefined: some may.
 */
export function tooLongFor(
  pending: Pending,
  { model, numbers }: Lane,
  workers: readonly (Worker | undefined)[],
): KvError | undefined {
  const { among, role } = pending.request;
  if (!numbers.some((number) => !pending.fits(workers[number]!))) return undefined;
  let most = 0;
  for (const worker of workers) {
    if (worker?.facts?.model !== model || worker.state === 'refused') continue;
    const { record, number } = worker;
    if (role === 'prefill' ? record.role === 'decode' : record.role === 'prefill' && !numbers.includes(number))
      continue;
    if (among?.has(record.name) === false || !pending.isReadBy(worker)) continue;
    if (pending.fits(worker)) return undefined;
    most = Math.max(most, worker.facts.maxTotalTokens!);
  }
  if (most === 0) return undefined;
  const fits = `at most ${most - 1} fit into its workers' pools with room for an answer`;
  return new KvError('TOO_LONG', `model ${model}: the prompt has ${pending.tokens} tokens; ${fits}; shorten it`);
}

/** Of one model's workers, those for a role. */
const laneOf = (model: string, role: DispatchRequest['role']): string => `${role ?? 'whole'} ${model}`;

/** A prefill worker computes for others and takes no whole request; one of both roles does what it leans to. */
function serves({ record, leaning }: Worker, role: DispatchRequest['role']): boolean {
  if (role === undefined) return record.role !== 'prefill' && (record.role === 'decode' || leaning !== 'prefill');
  return record.role === 'prefill' || (record.role === 'both' && (leaning === 'prefill' || leaning === 'mixed'));
}

const takesRequests = ({ state, record }: Worker): boolean => state === 'ready' && !record.draining;

function append(lists: Map<string, number[]>, key: string, value: number): void {
  const list = lists.get(key);
  if (list === undefined) lists.set(key, [value]);
  else list.push(value);
}
