/**
 * The engine's loop: one step after another, put together by the scheduler, run on the executor's native threads, handed out by
 * `Answers`. While a step runs the event loop is free.
 *
 * Invariants: a failed step fails the requests in it and no others; the loop sleeps only when nothing can be computed, and
 * whatever changes that wakes it.
 */
import { InvariantError, KvError } from '@kvtier/errors';
import type { Step, StepResult } from '@kvtier/executor';
import type { PrefixCache } from '@kvtier/prefix-cache';
import type { Answers } from './answers.ts';
import { buildStep, type Share, samples } from './batch.ts';
import type { EngineOptions } from './engine-options.ts';
import type { Scheduler } from './scheduler.ts';
import type { Clock } from './types.ts';

export interface EngineLoopParts {
  readonly options: EngineOptions;
  readonly clock: Clock;
  readonly kv: PrefixCache;
  readonly scheduler: Scheduler;
  readonly answers: Answers;
}

export class EngineLoop {
  readonly counts = { steps: 0, failedSteps: 0, prefillTokens: 0, decodeTokens: 0 };
  readonly #options: EngineOptions;
  readonly #clock: Clock;
  readonly #kv: PrefixCache;
  readonly #scheduler: Scheduler;
  readonly #answers: Answers;
  #woken = false;
  #resume: (() => void) | undefined;
  #ended: KvError | undefined;

  constructor({ options, clock, kv, scheduler, answers }: EngineLoopParts) {
    this.#options = options;
    this.#clock = clock;
    this.#kv = kv;
    this.#scheduler = scheduler;
    this.#answers = answers;
  }

  /** Why nothing is served any more. */
  get ended(): KvError | undefined {
    return this.#ended;
  }

  /** No further step. */
  end(error: KvError): void {
    this.#ended ??= error;
    this.wake();
  }

  /** Something outside may let a waiting request go on: the connector's answer to a match. */
  wake(): void {
    this.#woken = true;
    this.#resume?.();
  }

  /** Until `end`, or a defect. */
  async run(): Promise<void> {
    try {
      while (!this.#ended) {
        const batch = this.#scheduler.schedule();
        if (batch.length > 0) {
          await this.#step(batch);
          continue;
        }
        this.handOutEvents();
        this.#scheduler.exports.send();
        this.#options.onLoad?.();
        await this.sleep();
      }
      this.handOutEvents();
    } catch (thrown) {
      // Only a defect of ours comes here, and a GPU that has failed; what else the world does was caught where it happened.
      const error = thrown instanceof Error ? thrown : new Error(String(thrown));
      this.#options.logger?.error({ err: error }, 'engine: stopped');
      this.#ended ??=
        error instanceof KvError
          ? error
          : new KvError('IO', `engine: stopped by a defect: ${error.message}; restart it`, { cause: error });
      this.#answers.tellAll(this.#ended);
      this.#options.onDefect?.(error);
    }
  }

  handOutEvents(): void {
    const { onEvents, onPackedEvents } = this.#options;
    if (onPackedEvents) {
      const packed = this.#kv.takePackedEvents();
      if (packed.count > 0) onPackedEvents(packed);
    } else if (onEvents) {
      const events = this.#kv.takeEvents();
      if (events.length > 0) onEvents(events);
    }
  }

  /** Until the next wake, or not at all when one came since the last sleep. */
  async sleep(): Promise<void> {
    if (!this.#woken) {
      await new Promise<void>((resolve) => {
        this.#resume = resolve;
      });
      this.#resume = undefined;
    }
    this.#woken = false;
  }

  async #step(batch: readonly Share[]): Promise<void> {
    const step = buildStep(batch, this.#kv);
    for (const { request } of batch) request.executing = true;
    this.counts.steps++;
    const begunUs = this.#clock.nowUs();
    let result: StepResult | KvError;
    try {
      const run = (): Promise<StepResult> => this.#options.executor.execute(step);
      const arrived = batch[0]!.arrived;
      const running = arrived ? arrived.import(run) : run();
      // Beside the step: what these cost, no request waits for.
      this.#scheduler.exports.send();
      this.handOutEvents();
      result = await running;
    } catch (thrown) {
      if (thrown instanceof InvariantError) throw thrown;
      result = KvError.from(thrown);
    }
    if (result instanceof KvError) {
      if (result.code === 'GPU') throw result; // no later step can succeed in this process
      this.#failed(batch, result);
    } else if (step.import && !result.imported?.every((good) => good === 1)) {
      for (const { request } of batch) this.#scheduler.discarded(request); // computed anew, from where good blocks end
    } else {
      this.#executed(batch, step, result, begunUs);
    }
    this.#options.onLoad?.();
  }

  #failed(batch: readonly Share[], error: KvError): void {
    this.counts.failedSteps++;
    this.#options.logger?.error({ err: error, sequences: batch.length }, 'engine: a step failed');
    for (const { request } of batch) {
      request.executing = false; // one by one: an output callback may abort another request of this step
      if (request.state === 'finished') this.#scheduler.remove(request);
      else this.#answers.fail(request, error);
    }
  }

  #executed(batch: readonly Share[], step: Step, result: StepResult, begunUs: number): void {
    const elapsedS = (this.#clock.nowUs() - begunUs) / 1e6;
    let prefillTokens = 0;
    let decodeTokens = 0;
    let decodes = 0;
    let positions = 0;
    batch.forEach((share, i) => {
      const { request, count } = share;
      positions += count * request.computedTokens + (count * (count + 1)) / 2;
      if (request.computedTokens < request.promptTokens) prefillTokens += count;
      else {
        decodeTokens += count;
        if (count === 1) decodes++; // more: the answer of one that was preempted, computed anew
      }
      const drawn = samples(share) ? result.tokenIds[i]! : undefined;
      this.#scheduler.computed(request, count);
      if (request.state === 'finished') this.#scheduler.remove(request);
      else if (drawn !== undefined) this.#answers.drawn(request, drawn);
    });
    this.counts.prefillTokens += prefillTokens;
    this.counts.decodeTokens += decodeTokens;
    if (decodeTokens === 0 && !step.import)
      this.#options.connector.observePrefill(prefillTokens, positions, result.elapsedUs);
    const tokens = prefillTokens + decodeTokens;
    if (!step.import) this.#scheduler.load.step(tokens - decodes, decodes, elapsedS);
    this.#options.onStep?.({ sequences: batch.length, tokens, elapsedUs: result.elapsedUs });
  }
}
