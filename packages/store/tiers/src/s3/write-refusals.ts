/**
 * Whether a server takes writes, which it may refuse while all else goes on: a quota that is used up, a key that was disabled, a
 * permission that was taken back. After so many failures in a row packs are refused here, and one of them is tried after a growing,
 * random wait, for ever. What is held is read meanwhile, and nothing goes for what would not be stored.
 */
import type { KvError } from '@kvtier/errors';
import type { Log } from '@kvtier/runtime';
import { GrowingWait, threshold } from './request-breaker.ts';

export class WriteRefusals {
  readonly #log: Log;
  #failures = 0;
  readonly #wait = new GrowingWait();
  #reason = '';
  #tryAtMs = 0;
  #isTrying = false;

  constructor(log: Log) {
    this.#log = log;
  }

  /** Why writes are refused; "": they are not. */
  get reason(): string {
    return this.#reason;
  }

  /** A pack may set out: writes are not refused, or it is time for a try, one at a time. */
  get mayTry(): boolean {
    return this.#reason === '' || (!this.#isTrying && performance.now() >= this.#tryAtMs);
  }

  /** A pack sets out. Returns its end, which is to be called whatever becomes of it. */
  began(): () => void {
    if (this.#reason === '') return () => {};
    this.#isTrying = true;
    return () => {
      this.#isTrying = false;
      if (this.#reason !== '') this.#tryAtMs = performance.now() + this.#wait.nextMs();
    };
  }

  /** Of every try of a write, of whatever object: where one slot alone is free, it is the same each time. */
  noted(failure: KvError | undefined): void {
    if (failure === undefined) this.#wentWell();
    else if (this.#reason !== '') this.#reason = failure.message;
    else if (++this.#failures >= threshold) {
      this.#reason = failure.message;
      this.#tryAtMs = performance.now() + this.#wait.firstMs();
      this.#log.error(
        { tier: 's3', reason: this.#reason },
        'the s3 tier refuses writes until its server takes one; what it holds is read',
      );
    }
  }

  #wentWell(): void {
    this.#failures = 0;
    if (this.#reason === '') return;
    this.#reason = '';
    this.#wait.wentWell();
    this.#log.info({ tier: 's3' }, 'the s3 tier takes writes again');
  }
}
