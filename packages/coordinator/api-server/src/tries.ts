/**
 * The workers of one answer, one after another: what failed at one and may be another's success is tried there.
 *
 * While nobody is ready who could be asked at all, it waits for one that is expected (expected.ts).
 *
 * Where all that it may have answer 500, its request may be why, and no one is asked twice: each would compute it again. One that is away,
 * expected, and has not been asked is waited for then.
 *
 * Bounded: `maxTries` workers that fail one after another (a request must not kill them all; those that are full do not count), and
 * `withinMs` from the first of them on. So long it also waits for a worker to come, when none is left. Each token that comes is a new
 * beginning.
 */
import { type Choice, type Dispatch, type DispatchRequest, Outdated, Saturated } from '@kvtier/dispatch';
import { KvError, type KvErrorCode } from '@kvtier/errors';
import type { Engines } from './engines.ts';
import type { Expected } from './expected.ts';
import { PodRefusal } from './pod-refusal.ts';

export interface TryLimits {
  readonly maxTries: number;
  readonly withinMs: number;
}

type Asked = Omit<DispatchRequest, 'except' | 'isAgain'>;

export interface TriesPlace {
  readonly dispatch: Dispatch;
  readonly engines: Pick<Engines, 'onChange'>;
  readonly tries: TryLimits;
  readonly expected: Expected;
}

/** Failures of a worker, and not of the request. */
const elsewhere: ReadonlySet<KvErrorCode> = new Set(['DISCONNECTED', 'BUSY', 'GPU', 'TOO_LONG']);
/** Where nobody else has it, these are the answer before the first token; a worker that died is started again. */
const isFinal = ({ code }: KvError): boolean => code === 'BUSY' || code === 'TOO_LONG';
/** Before a worker that failed is asked again, as none is left: doubles. */
const firstPauseMs = 20;
const mostPauseMs = 500;

export class Tries {
  readonly #dispatch: Dispatch;
  readonly #engines: Pick<Engines, 'onChange'>;
  readonly #limits: TryLimits;
  readonly #expected: Expected;
  readonly #beganMs = performance.now();
  /** Names of those that failed. */
  #except = new Set<string>();
  #failure: KvError | undefined;
  /** All of these failed so that the request may be why. */
  #mayBeRequestOf = true;
  /** All failures until now were such. */
  #mayBeRequest = true;
  #untilMs = 0;
  #pauseMs = firstPauseMs;
  /** Workers that failed since the last token. */
  #count = 0;
  /** It has been counted as a request, whoever is asked from now on. */
  #hasAsked = false;
  /** Some worker has given a token: the client cannot be told to come again. */
  #hasBegun = false;

  constructor({ dispatch, engines, tries, expected }: TriesPlace) {
    this.#dispatch = dispatch;
    this.#engines = engines;
    this.#limits = tries;
    this.#expected = expected;
  }

  /**
   * @throws KvError: no worker has it, or the last failure when no other is left; Outdated: its tokens are to be made anew; the reason of
   * `signal`
   */
  async next(request: Asked, signal: AbortSignal): Promise<Choice> {
    for (;;) {
      const isAgain = this.#hasAsked;
      this.#hasAsked = true;
      try {
        return await this.#dispatch.choose({ ...request, isAgain, except: this.#except }, signal);
      } catch (error) {
        const failure = this.#failure;
        if (signal.aborted || !(error instanceof KvError) || !elsewhere.has(error.code)) throw error;
        if (error instanceof Outdated) throw error;
        if (failure === undefined) {
          await this.#awaitSomebody(request, error, signal);
          continue;
        }
        if (!this.#hasBegun && isFinal(failure)) throw failure;
        if (!this.#hasBegun && isFinal(error)) throw error;
        const isSuspect = !this.#hasBegun && this.#except.size > 0 && this.#mayBeRequestOf;
        if (isSuspect) {
          await this.#awaitAnother(request, failure, signal);
          continue;
        }
        await this.#pause(failure, signal);
        this.#beginAnew();
      }
    }
  }

  /** Whoever failed until now answered so that the request may be why. */
  get mayBeRequest(): boolean {
    return this.#mayBeRequest;
  }

  /** Its worker gave a token. */
  progressed(): void {
    this.#hasBegun = true;
    this.#count = 0;
    this.#failure = undefined;
    this.#pauseMs = firstPauseMs;
    this.#beginAnew();
  }

  /** Its worker failed so. @throws `error` when that is final */
  failed(error: unknown, { worker }: Choice, signal: AbortSignal): void {
    if (signal.aborted) throw signal.reason;
    const mayBeRequest = error instanceof PodRefusal && error.mayBeRequest;
    if (!mayBeRequest) this.#mayBeRequest = false;
    if (!(error instanceof KvError)) throw error;
    if (!error.retry && !elsewhere.has(error.code)) throw error;
    const nowMs = performance.now();
    if (this.#failure === undefined) this.#untilMs = nowMs + this.#limits.withinMs;
    // One pool that is too small says nothing of the others.
    if (this.#failure === undefined || error.code !== 'TOO_LONG') this.#failure = error;
    // One that is in time nowhere it was tried is not asked of all.
    if (error.code !== 'BUSY' || error instanceof Saturated) this.#count++;
    if (this.#count >= this.#limits.maxTries || nowMs >= this.#untilMs) throw error;
    if (!mayBeRequest) this.#mayBeRequestOf = false;
    this.#except = new Set([...this.#except, worker.record.name]);
  }

  #beginAnew(): void {
    this.#except = new Set();
    this.#mayBeRequestOf = true;
  }

  /**
   * Until others are ready than now, of whom none may have it, though not all were asked. @throws `failure` when none is expected in time;
   * the reason of `signal`
   */
  async #awaitAnother(
    { model, among, firstTokenByMs = Number.POSITIVE_INFINITY }: Asked,
    failure: KvError,
    signal: AbortSignal,
  ): Promise<void> {
    const expected = this.#expected;
    const others = { among, except: this.#except };
    const untilMs = Math.min(expected.otherUntilMs(model, others), this.#untilMs, firstTokenByMs);
    if (untilMs <= performance.now()) throw failure;
    const ready = expected.readyOf(model);
    const isOver = (): boolean =>
      expected.readyOf(model) !== ready || expected.otherUntilMs(model, others) <= performance.now();
    await expected.wait(isOver, untilMs, signal);
  }

  /** Until some worker of its model is ready. @throws `error` when none is expected in time; the reason of `signal` */
  async #awaitSomebody(
    { model, firstTokenByMs = Number.POSITIVE_INFINITY }: Asked,
    error: KvError,
    signal: AbortSignal,
  ): Promise<void> {
    const expected = this.#expected;
    const lastMs = Math.min(this.#beganMs + expected.awayMs, firstTokenByMs);
    const untilMs = Math.min(expected.untilMs(model), lastMs);
    if (error.code !== 'DISCONNECTED' || untilMs <= performance.now()) throw error;
    const facts = { model };
    const isOver = (): boolean => expected.isServed({ facts }) || expected.untilMs(model) <= performance.now();
    await expected.wait(isOver, untilMs, signal);
  }

  /** Until some worker changed, or for a while. @throws `failure` when the time is over; the reason of `signal` */
  async #pause(failure: KvError, signal: AbortSignal): Promise<void> {
    const leftMs = this.#untilMs - performance.now();
    if (leftMs <= 0) throw failure;
    await new Promise<void>((resolve, reject) => {
      const end = (settle: () => void): void => {
        clearTimeout(timer);
        stop();
        signal.removeEventListener('abort', leave);
        settle();
      };
      const leave = (): void => end(() => reject(signal.reason as Error));
      const stop = this.#engines.onChange(() => end(resolve));
      const timer = setTimeout(() => end(resolve), Math.min(this.#pauseMs, leftMs));
      signal.addEventListener('abort', leave, { once: true });
    });
    this.#pauseMs = Math.min(2 * this.#pauseMs, mostPauseMs);
  }
}
