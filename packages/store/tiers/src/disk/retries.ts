/**
 * When a device that is out of service is tried again: with pauses that double, and begin anew only after it has been well for a while.
 * Invariant: one try at a time, and none after `stop`.
 */
import { defaultRetry, type RetrySettings } from './options.ts';

export class Retries {
  readonly #limits: RetrySettings;
  readonly #attempt: () => Promise<void>;
  #waitMs: number;
  #backSinceMs = 0;
  #timer: NodeJS.Timeout | undefined;
  #trying: Promise<void> | undefined;
  #isStopped = false;

  /** `attempt` says how it went (`failedAgain`, `back`) and never throws. */
  constructor(attempt: () => Promise<void>, limits: RetrySettings = defaultRetry) {
    this.#attempt = attempt;
    this.#limits = limits;
    this.#waitMs = limits.firstMs;
  }

  /** The try under way. */
  get trying(): Promise<void> | undefined {
    return this.#trying;
  }

  /** It went out of service. Returns the milliseconds until it is tried again. */
  failed(): number {
    const { firstMs, longestMs } = this.#limits;
    const wasWell = performance.now() - this.#backSinceMs > longestMs;
    return this.#again(wasWell ? firstMs : this.#twice());
  }

  /** A try ended so. Returns the milliseconds until the next one. */
  failedAgain(): number {
    return this.#again(this.#twice());
  }

  back(): void {
    this.#backSinceMs = performance.now();
  }

  stop(): void {
    this.#isStopped = true;
    clearTimeout(this.#timer);
  }

  #twice(): number {
    return Math.min(this.#limits.longestMs, this.#waitMs * 2);
  }

  #again(waitMs: number): number {
    this.#waitMs = waitMs;
    clearTimeout(this.#timer);
    if (this.#isStopped) return waitMs;
    this.#timer = setTimeout(() => {
      this.#trying ??= this.#attempt().finally(() => {
        this.#trying = undefined;
      });
    }, waitMs).unref();
    return waitMs;
  }
}
