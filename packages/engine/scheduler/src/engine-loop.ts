/**
 * The engine's loop: one step after another, put together by the scheduler, run on the executor's native threads, handed out by
 * `Answers`. While a step runs the event loop is free.
 *
 *   executor    | step 1          |     | step 2          |     | step 3
 *   event loop  | hand out 0 ...        | hand out 1 ...        |
 *                                 take 1 in, launch 2   take 2 in, launch 3
 *
 * The executor stands still from the end of a step to the launch of the next one, so nothing happens there but what that needs:
 * tokens are taken in, the step is put together. Callers hear of their tokens while it runs.
 *
 * Invariants: a failed step fails the requests in it and no others, a draw that is no token its own request; the loop sleeps only
 * when nothing can be computed, and whatever changes that wakes it.
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

interface RunningStep {
  readonly batch: readonly Share[];
  readonly step: Step;
  readonly begunUs: number;
  /** It computes the head of a hit, and the rest is being loaded. */
  readonly ofHead: boolean;
  readonly result: Promise<StepResult | KvError | InvariantError>;
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
  #sending: NodeJS.Immediate | undefined;
  /** Of the step that is over, to be told beside the next one. */
  #told: Parameters<NonNullable<EngineOptions['onStep']>>[0] | undefined;

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
        let running: RunningStep | undefined;
        try {
          running = this.#launch();
        } finally {
          this.#handOut();
        }
        if (running) await this.#over(running);
        else await this.sleep();
      }
      this.#handOut();
    } catch (thrown) {
      // Only a defect of ours comes here, and a GPU that has failed; what else the world does was caught where it happened.
      const error = thrown instanceof Error ? thrown : new Error(String(thrown));
      this.#options.logger?.error({ err: error }, 'engine: stopped');
      // Of all these requests one at most has to do with it: another engine goes on with the others, as when this process had died.
      const defect = { retry: true, cause: error };
      this.#ended ??=
        error instanceof KvError
          ? error
          : new KvError('IO', `engine: stopped by a defect: ${error.message}; restart it`, defect);
      this.#options.onLoad?.(); // nothing new until the process ends
      this.#scheduler.exports.end();
      this.#answers.tellAll(this.#ended);
      this.#options.onDefect?.(error);
    }
  }

  /** What the step before has drawn, and what else was put off until the executor is busy: no request waits for these. */
  #handOut(): void {
    if (this.#answers.handOut()) this.#sendExportsSoon();
    else this.#scheduler.exports.send();
    this.handOutEvents();
    const told = this.#told;
    this.#told = undefined;
    if (told) this.#options.onStep?.(told);
    this.#scheduler.incoming.renewAnswers(); // for the next pass
    this.#options.onLoad?.();
  }

  /** In a turn of their own: what callers have just been told leaves the process at the end of this one. */
  #sendExportsSoon(): void {
    this.#sending ??= setImmediate(() => {
      this.#sending = undefined;
      this.#scheduler.exports.send();
    });
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

  /** The next step runs when this returns; undefined: nothing can be computed now. */
  #launch(): RunningStep | undefined {
    const batch = this.#scheduler.schedule();
    if (batch.length === 0) return undefined;
    const step = buildStep(batch, this.#kv);
    for (const { request } of batch) request.executing = true;
    this.counts.steps++;
    const begunUs = this.#clock.nowUs();
    // An import computes nothing.
    this.#scheduler.load.begun(step.import ? 0 : tokensAheadOf(batch), begunUs);
    const run = (): Promise<StepResult> => this.#options.executor.execute(step);
    const arrived = batch[0]!.arrived;
    const result = (arrived ? arrived.import(run) : run()).catch((thrown: unknown) => {
      if (thrown instanceof InvariantError) return thrown;
      return KvError.from(thrown);
    });
    return { batch, step, begunUs, ofHead: batch.some(({ request }) => request.head?.isLoading), result };
  }

  async #over({ batch, step, begunUs, ofHead, result: running }: RunningStep): Promise<void> {
    const result = await running;
    this.#scheduler.load.over();
    if (result instanceof InvariantError) throw result;
    if (result instanceof KvError) {
      if (result.code === 'GPU') throw result; // no later step can succeed in this process
      this.#failed(batch, result);
    } else if (step.import && !result.imported?.every((good) => good === 1)) {
      for (const { request } of batch) this.#scheduler.discarded(request); // computed anew, from where good blocks end
    } else {
      this.#executed({ batch, step, begunUs, ofHead }, result);
    }
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

  #executed({ batch, step, begunUs, ofHead }: Omit<RunningStep, 'result'>, result: StepResult): void {
    const elapsedUs = this.#clock.nowUs() - begunUs;
    const elapsedS = elapsedUs / 1e6;
    let prefillTokens = 0;
    let decodeTokens = 0;
    let decodes = 0;
    let positions = 0;
    let mostLeft = 0;
    batch.forEach((share, i) => {
      const { request, count } = share;
      mostLeft = Math.max(mostLeft, request.openTokens - request.computedTokens); // of one that decodes: 1
      positions += count * request.computedTokens + (count * (count + 1)) / 2;
      if (request.computedTokens < request.promptTokens) prefillTokens += count;
      else {
        decodeTokens += count;
        if (count === 1) decodes++; // more: the answer of one that was preempted, computed anew
      }
      const drawn = samples(share) ? result.tokenIds[i]! : undefined;
      if (drawn !== undefined && (drawn < 0 || drawn >= this.#options.executor.model.vocabSize)) {
        if (this.#scheduler.spoiled(request)) this.#answers.beginsAnew(request);
        else if (request.state !== 'finished') this.#answers.drewNoToken(request, drawn);
        return;
      }
      if (drawn !== undefined) this.#scheduler.proved(request);
      this.#scheduler.computed(request, count);
      if (request.state === 'finished') this.#scheduler.remove(request);
      else if (drawn !== undefined) this.#answers.drawn(request, drawn);
    });
    this.counts.prefillTokens += prefillTokens;
    this.counts.decodeTokens += decodeTokens;
    // What a request waits for: more than the executor's own time by the way to its threads and back.
    if (decodeTokens === 0 && !step.import)
      this.#options.connector.observePrefill(prefillTokens, positions, elapsedUs, ofHead);
    const tokens = prefillTokens + decodeTokens;
    if (!step.import) this.#scheduler.stepped(tokens - decodes, decodes, elapsedS, mostLeft);
    this.#told = { sequences: batch.length, tokens, elapsedUs: result.elapsedUs };
  }
}

/** Of what the batch computes, all but the tokens of requests that decode. */
function tokensAheadOf(batch: readonly Share[]): number {
  let tokens = 0;
  for (const { request, count } of batch) if (count > 1 || !request.firstOutputDone) tokens += count;
  return tokens;
}
