/**
 * A circuit breaker over one tier. Pure: time is an argument.
 *
 *     closed ──failures in a row──▶ open ──its time is over──▶ half-open ──a read that answers──▶ closed
 *                                     ▲──────────────────────────── fails ───┘   (for twice as long)
 *
 * Invariant: while it is open nobody waits for the tier; while it is half-open one read at a time finds out.
 */
export interface BreakerLimits {
  /** Failures in a row that open it. */
  readonly breakerFailures: number;
  /** It stays open this long at first, and at most. */
  readonly breakerOpenMs: number;
  readonly breakerMaxOpenMs: number;
}

export type BreakerState = 'closed' | 'open' | 'half_open';

export class Breaker {
  readonly #limits: BreakerLimits;
  #failures = 0;
  #openMs: number;
  /** 0: closed. */
  #probeAtUs = 0;
  #opened = 0;
  #reason = '';

  constructor(limits: BreakerLimits) {
    this.#limits = limits;
    this.#openMs = limits.breakerOpenMs;
  }

  state(nowUs: number): BreakerState {
    if (this.#probeAtUs === 0) return 'closed';
    return nowUs < this.#probeAtUs ? 'open' : 'half_open';
  }

  /** Why it opened last; '' while it is closed. */
  get reason(): string {
    return this.#reason;
  }

  /** How often it has opened. */
  get opened(): number {
    return this.#opened;
  }

  succeeded(): void {
    this.#failures = 0;
    this.#probeAtUs = 0;
    this.#openMs = this.#limits.breakerOpenMs;
    this.#reason = '';
  }

  /** Returns true when this opened it. */
  failed(nowUs: number, reason: string): boolean {
    const state = this.state(nowUs);
    if (state === 'open') return false; // a read from before
    if (state === 'closed' && ++this.#failures < this.#limits.breakerFailures) return false;
    if (state === 'half_open') this.#openMs = Math.min(2 * this.#openMs, this.#limits.breakerMaxOpenMs);
    this.#probeAtUs = nowUs + this.#openMs * 1000;
    this.#reason = reason;
    this.#opened++;
    return true;
  }
}
