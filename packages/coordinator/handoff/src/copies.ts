/**
 * Prefixes copied to another worker's cache node before those that hold them are too few, and to workers that have just joined. What to copy:
 * `CopyPlanner` of the routing room. The worker is told (`Prefetch`), its node brings the blocks from peers and shared tiers behind all
 * that requests wait for, and the KV index hears of them by the node's events: that ends a copy. Nobody computes anything.
 *
 *     requests ──► planner of their model ──every 100 ms──► Engine.Prefetch ──► node ──events──► KV index ──► planner
 *
 * Invariants: what is copied is bounded by one budget for all models; no request waits for a copy, and none fails by one.
 */
import type { Held, Holdings, Workers } from '@kvtier/dispatch';
import { KvError } from '@kvtier/errors';
import { maxMedia } from '@kvtier/kv-index';
import type { Worker } from '@kvtier/registry';
import {
  Budget,
  type BudgetOptions,
  type Copy,
  type CopyEnd,
  CopyPlanner,
  type StatesFor,
  type WorkerState,
} from '@kvtier/routing';
import type { Logger } from '@kvtier/telemetry';
import type { GenerateRequest, PrefetchRequest } from '@kvtier/wire/grpc';
import type { Asked } from './asked.ts';
import { CopyMetrics } from './copy-metrics.ts';
import { sideOf } from './sides.ts';

/** What it asks of the workers: the registry's fleet is this. */
export interface CopyEngines extends Pick<Workers, 'workers'> {
  engine(number: number): { prefetch(request: PrefetchRequest): Promise<number> };
}

export interface CopiesOptions {
  readonly engines: CopyEngines;
  readonly holdings: Pick<Holdings, 'match'>;
  readonly limits: BudgetOptions;
  /** Waiting for a first token that is never too long. */
  readonly ttftMs: number;
  readonly logger: Logger;
  readonly lookMs?: number;
}

type Kept = Pick<PrefetchRequest, 'promptTokenIds' | 'cacheSalt'>;

const maxModels = 16;
/** Answers are seldom as long as clients allow. */
const likelyTokens = 512;
/** Medium `peer` of the KV index. */
const peer = 3;
/** Workers take no longer deadline. */
const longestMs = 600_000;

export class Copies {
  readonly metrics: CopyMetrics;
  readonly #options: CopiesOptions;
  readonly #budget: Budget;
  readonly #planners = new Map<string, CopyPlanner<Kept>>();
  /** By number, the life of the worker that was there at the last look. */
  #lives: (string | undefined)[] = [];
  readonly #timer: NodeJS.Timeout | undefined;

  constructor(options: CopiesOptions) {
    this.#options = options;
    this.#budget = new Budget(options.limits);
    this.metrics = new CopyMetrics(this.#budget);
    if (this.#budget.isOff) return;
    this.#timer = setInterval(() => this.look(performance.now()), options.lookMs ?? 100);
    this.#timer.unref();
  }

  /** A request of this prompt came. */
  came(asked: Asked, { promptTokenIds, cacheSalt, loraName }: GenerateRequest): void {
    if (this.#timer === undefined || asked.keys.length === 0 || asked.hasBegun || loraName !== '') return;
    const { blockTokens } = asked;
    const request = { ...asked, maxTokens: Math.min(asked.maxTokens, likelyTokens) };
    const keep = (blocks: number): Kept => ({
      promptTokenIds: promptTokenIds.slice(0, blocks * blockTokens),
      cacheSalt,
    });
    this.#plannerOf(asked.model).came(request, keep, performance.now());
  }

  /** Begins what should be copied now. Called by itself. */
  look(nowMs: number): void {
    this.#follow(nowMs);
    for (const [model, planner] of this.#planners) {
      const workers = this.#workersOf(model);
      const statesFor = this.#statesOf(model, workers);
      const ended = ({ why }: Copy<Kept>, how: CopyEnd): void => this.metrics.ended(why, how);
      // One that is alone gets none, but what is under way to it has its end all the same.
      if (workers.length < 2) planner.settle(nowMs, statesFor, ended);
      else {
        const blockBytes = Math.max(...workers.map(({ facts }) => facts!.blockBytes));
        for (const copy of planner.look(nowMs, blockBytes, statesFor, ended)) void this.#ask(planner, copy);
      }
    }
  }

  close(): void {
    clearInterval(this.#timer);
  }

  async #ask(planner: CopyPlanner<Kept>, copy: Copy<Kept>): Promise<void> {
    const { engines, logger } = this.#options;
    const worker = engines.workers()[copy.worker]?.record.name;
    const { why, blocks, brings, withinMs } = copy;
    logger.debug({ worker, why, blocks, brings }, 'copied ahead: a prefix that is asked for often');
    try {
      // The planner gives it up then: a worker that went on would bring in what nobody counts on.
      const deadlineMs = Math.min(Math.ceil(withinMs), longestMs);
      const asked = await engines.engine(copy.worker).prefetch({ ...copy.kept, deadlineMs });
      if (asked > 0) return;
      throw new KvError('DISCONNECTED', 'no cache node is attached', { retry: true });
    } catch (error) {
      logger.debug({ worker }, `not copied ahead: ${(error as Error).message}`);
      if (planner.refused(copy, performance.now())) this.metrics.ended(why, 'refused');
    }
  }

  /** Who came and went since the last look. */
  #follow(nowMs: number): void {
    const lives: (string | undefined)[] = [];
    for (const worker of this.#options.engines.workers())
      if (worker !== undefined && isTarget(worker))
        lives[worker.number] = `${worker.facts!.model} ${worker.record.name} ${worker.facts!.bootEpoch}`;
    for (let number = 0; number < Math.max(lives.length, this.#lives.length); number++) {
      if (lives[number] === this.#lives[number]) continue;
      for (const planner of this.#planners.values())
        for (const { why } of planner.left(number)) this.metrics.ended(why, 'left');
      const model = this.#options.engines.workers()[number]?.facts?.model;
      if (lives[number] !== undefined && model !== undefined) this.#planners.get(model)?.joined(number, nowMs);
    }
    this.#lives = lives;
  }

  #plannerOf(model: string): CopyPlanner<Kept> {
    let planner = this.#planners.get(model);
    if (planner !== undefined) return planner;
    if (this.#planners.size >= maxModels) {
      const [oldest, its] = this.#planners.entries().next().value!;
      its.close();
      this.#planners.delete(oldest);
    }
    planner = new CopyPlanner({ budget: this.#budget, targetS: this.#options.ttftMs / 1000 });
    this.#planners.set(model, planner);
    return planner;
  }

  #workersOf(model: string): Worker[] {
    const workers: Worker[] = [];
    for (const worker of this.#options.engines.workers())
      if (worker !== undefined && isTarget(worker) && worker.facts!.model === model) workers.push(worker);
    return workers;
  }

  /** Of the workers' loads at this moment, for any number of prompts. */
  #statesOf(model: string, workers: readonly Worker[]): StatesFor {
    const numbers = workers.map(({ number }) => number);
    let loads: readonly WorkerState[] | undefined;
    return ({ keys }) => {
      loads ??= workers.map((worker) => sideOf(worker, undefined, none, 0));
      const matches: readonly Held[] = this.#options.holdings.match(model, keys, numbers);
      const states: (WorkerState | undefined)[] = [];
      for (const [at, number] of numbers.entries()) {
        const match = matches[at] ?? none;
        const { remoteBlocks = 0, remoteMedium = peer } = match;
        states[number] = { ...loads[at]!, match, remoteBlocks, remoteMedium };
      }
      return states;
    };
  }
}

const none: Held = { blocks: 0, byMedium: new Int32Array(maxMedia) };

/** It can be told to bring blocks in, and gets requests. */
const isTarget = ({ state, record, facts }: Worker): boolean =>
  state === 'ready' && !record.draining && record.kind === 'kvtier' && record.node !== null && facts !== undefined;
