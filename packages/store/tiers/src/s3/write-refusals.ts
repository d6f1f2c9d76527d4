/**
 * Whether a server takes writes, which it may refuse while all else goes on: a quota that is used up, a key that was disabled, a
 * permission that was taken back, or never given. After so many failures in a row, or from the start, packs are refused here, and one of
 * them is tried after a growing, random wait, for ever. What is held is read meanwhile, and nothing goes for what would not be stored.
 */
import { KvError } from '@kvtier/errors';
import type { Log } from '@kvtier/runtime';
import { GrowingWait, threshold } from './request-breaker.ts';

const refusedLine = 'the s3 tier refuses writes until its server takes one; what it holds is read';
const mendLine = 'the s3 tier takes no writes until this is mended; what it holds is read';

export class WriteRefusals {
  readonly #log: Log;
  #failures = 0;
  readonly #wait = new GrowingWait();
  #reason = '';
  #tryAtMs = 0;
  #isTrying = false;
  /** What has to go well before a pack is tried: at the start it did not. */
  #proof: ((deadlineMs: number) => Promise<void>) | undefined;

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

  /** From the start. `prove`: what has to go well before the first pack; rejects with a KvError. */
  refusedAtStart(failure: KvError, prove: (deadlineMs: number) => Promise<void>): void {
    this.#proof = prove;
    this.#refuse(failure);
    // A node that is only to read is refused what it does not need: no error.
    this.#log.warn({ tier: 's3', reason: this.#reason }, refusedLine);
  }

  /** A pack that has set out may be written. @throws KvError when not */
  async proven(deadlineMs: number): Promise<void> {
    if (this.#proof === undefined) return;
    try {
      await this.#proof(deadlineMs);
      this.#proof = undefined;
    } catch (error) {
      const failure = KvError.from(error);
      if (failure.code === 'CONFIG' && failure.message !== this.#reason) {
        // A start would have been refused: said once, as long as it does not change.
        this.#log.error({ tier: 's3', reason: failure.message }, mendLine);
      }
      this.noted(failure);
      throw error;
    }
  }

  /** Of every try of a write, of whatever object: where one slot alone is free, it is the same each time. */
  noted(failure: KvError | undefined): void {
    if (failure === undefined) this.#wentWell();
    else if (this.#reason !== '') this.#reason = failure.message;
    else if (++this.#failures >= threshold) {
      this.#refuse(failure);
      this.#log.error({ tier: 's3', reason: this.#reason }, refusedLine);
    }
  }

  #refuse(failure: KvError): void {
    this.#reason = failure.message;
    this.#tryAtMs = performance.now() + this.#wait.firstMs();
  }

  #wentWell(): void {
    this.#failures = 0;
    if (this.#reason === '') return;
    this.#reason = '';
    this.#wait.wentWell();
    this.#log.info({ tier: 's3' }, 'the s3 tier takes writes again');
  }
}
