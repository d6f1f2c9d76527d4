/**
 * Decides when a server counts as gone: after so many failed tries in a row, without a good one between, and not all of one object.
 * It comes back through `probe`, tried after a growing, random wait, for ever. Time limits bound one request; this bounds how many
 * pay for them.
 */
import { KvError } from '@kvtier/errors';

const threshold = 5;
const firstWaitMs = 500;
const maxWaitMs = 30_000;

export interface BreakerOptions {
  readonly onOpen: (reason: string) => void;
  /** Brings what is known up to date; throws while the server is still gone. */
  readonly probe: () => Promise<void>;
  readonly onClosed: () => void;
}

export class RequestBreaker {
  readonly #options: BreakerOptions;
  #failures = 0;
  /** Objects that failed, two at most; emptied by what does not. */
  readonly #failing = new Set<string>();
  #reason = '';
  #probing = false;
  #waits = 0;
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
    this.#waits = 0;
    this.#options.onOpen(this.#reason);
    this.#plan();
  }

  stop(): void {
    this.#stopped = true;
    clearTimeout(this.#timer);
  }

  #plan(): void {
    const boundMs = Math.min(maxWaitMs, firstWaitMs * 2 ** this.#waits++);
    this.#timer = setTimeout(() => void this.#probe(), boundMs / 2 + (Math.random() * boundMs) / 2);
  }

  async #probe(): Promise<void> {
    this.#probing = true;
    try {
      await this.#options.probe();
      this.#reason = '';
      this.#wentWell();
      if (!this.#stopped) this.#options.onClosed();
    } catch (error) {
      this.#reason = KvError.from(error).message;
      if (!this.#stopped) this.#plan();
    } finally {
      this.#probing = false;
    }
  }
}
