/**
 * Decides when a server counts as gone: after so many failed tries in a row, without a good one between, and not all of one object.
 * It comes back through `probe`, tried after a growing, random wait, for ever. Time limits bound one request; this bounds how many
 * pay for them. Writes that were answered with a failure do not count here: a server may refuse them alone (write-refusals.ts).
 */
import { KvError } from '@kvtier/errors';

/** Failures in a row. */
export const threshold = 5;
const firstWaitMs = 500;
const maxWaitMs = 30_000;

export interface BreakerOptions {
  readonly onOpen: (reason: string) => void;
  /** Brings what is known up to date; throws while the server is still gone. */
  readonly probe: () => Promise<void>;
  readonly onClosed: () => void;
}

/**
 * Random waits below a bound that doubles, and begins anew only after all was well for a while: or what fails soon after each good
 * try would be tried all the time.
 */
export class GrowingWait {
  #waits = 0;
  #wellSinceMs = Number.NEGATIVE_INFINITY;

  /** It failed, after it had been well. */
  firstMs(): number {
    if (performance.now() - this.#wellSinceMs > maxWaitMs) this.#waits = 0;
    return this.nextMs();
  }

  /** It failed again. */
  nextMs(): number {
    const boundMs = Math.min(maxWaitMs, firstWaitMs * 2 ** this.#waits++);
    return boundMs / 2 + (Math.random() * boundMs) / 2;
  }

  wentWell(): void {
    this.#wellSinceMs = performance.now();
  }
}

export class RequestBreaker {
  readonly #options: BreakerOptions;
  #failures = 0;
  /** Objects that failed, two at most; emptied by what does not. */
  readonly #failing = new Set<string>();
  readonly #wait = new GrowingWait();
  #reason = '';
  #probing = false;
  #timer: NodeJS.Timeout | undefined;
  #stopped = false;

  constructor(options: BreakerOptions) {
    this.#options = options;
  }

  /** Why the server counts as gone; "": it does not. */
  get reason(): string {
    return this.#reason;
  }

  /** Why a request should not be tried now. */
  get suspended(): string | undefined {
    return this.#reason === '' || this.#probing ? undefined : this.#reason;
  }

  /** `object` was asked for; undefined: the bucket. One object that fails again and again is no server that is gone. */
  noted(failure: KvError | undefined, object: string | undefined): void {
    if (failure === undefined) this.#wentWell();
    else {
      this.#failures++;
      if (object !== undefined && this.#failing.size < 2) this.#failing.add(object);
      if (this.#failures >= threshold && (object === undefined || this.#failing.size > 1)) this.open(failure);
    }
  }

  #wentWell(): void {
    this.#failures = 0;
    this.#failing.clear();
  }

  open(failure: KvError): void {
    if (this.#reason !== '' || this.#stopped) return;
    this.#reason = failure.message;
    this.#options.onOpen(this.#reason);
    this.#plan(this.#wait.firstMs());
  }

  stop(): void {
    this.#stopped = true;
    clearTimeout(this.#timer);
  }

  #plan(waitMs: number): void {
    this.#timer = setTimeout(() => void this.#probe(), waitMs);
  }

  async #probe(): Promise<void> {
    this.#probing = true;
    try {
      await this.#options.probe();
      this.#reason = '';
      this.#wentWell();
      this.#wait.wentWell();
      if (!this.#stopped) this.#options.onClosed();
    } catch (error) {
      this.#reason = KvError.from(error).message;
      if (!this.#stopped) this.#plan(this.#wait.nextMs());
    } finally {
      this.#probing = false;
    }
  }
}
