/**
 * How fast a tier delivers, measured while it is busy: bytes that arrived ÷ time during which at least one read was in
 * flight, over reads that fade; larger ones weigh more, so that the first one of some size settles what was only guessed before. Parallel
 * reads are counted once in time, so the figure is the tier's and not one read's.
 *
 * What was measured long ago is believed less and less where it was worse than the guess: nothing would be read from a tier that was
 * slow once, and nothing be learned of it again.
 */
const keep = 0.75;
const latencySmoothing = 0.25;
/** Of the guess. */
const guessBytes = 256 << 10;
/** The wait for the first byte is at most this share of a busy time. */
const mostLatencyShare = 0.75;
const believedUs = 30e6;
const halfLifeUs = 30e6;

export class RateMeter {
  readonly #guess: { readonly bytesPerUs: number; readonly latencyUs: number };
  #bytes = guessBytes;
  #us: number;
  #latencyUs: number;
  #inFlight = 0;
  #lastUs = 0;
  /** The tier was idle when the read began whose end comes next. */
  #fromIdle = false;
  #measuredUs = 0;

  /** The figures to believe until the first read has ended. */
  constructor(initial: { readonly bytesPerUs: number; readonly latencyUs: number }) {
    this.#guess = initial;
    this.#us = guessBytes / initial.bytesPerUs;
    this.#latencyUs = initial.latencyUs;
  }

  /** A read starts now; call `end` with its start time. */
  start(nowUs: number): void {
    if (this.#inFlight++ > 0) return;
    this.#lastUs = nowUs;
    this.#fromIdle = true;
  }

  /** A read ended with `bytes` (0: it failed and says nothing about the rate). */
  end(nowUs: number, startUs: number, bytes: number): void {
    this.#inFlight--;
    const busyUs = Math.max(1, nowUs - this.#lastUs);
    const fromIdle = this.#fromIdle;
    const waitedUs = fromIdle ? Math.min(this.#latencyUs, busyUs * mostLatencyShare) : 0;
    this.#lastUs = nowUs;
    this.#fromIdle = false;
    if (bytes === 0) return;
    this.#bytes = this.#bytes * keep + bytes;
    this.#us = this.#us * keep + busyUs - waitedUs;
    this.#measuredUs = nowUs;
    if (!fromIdle) return; // what it waited for was another read
    const latencyUs = Math.max(0, nowUs - startUs - bytes / this.bytesPerUs);
    this.#latencyUs += latencySmoothing * (latencyUs - this.#latencyUs);
  }

  get bytesPerUs(): number {
    return this.#bytes / this.#us;
  }

  /** Expected time for `bytes`, with `aheadBytes` in the queue before them. */
  estimateUs(bytes: number, aheadBytes: number, nowUs = this.#measuredUs): number {
    if (bytes === 0) return 0;
    const { bytesPerUs, latencyUs } = this.#guess;
    const belief = 0.5 ** (Math.max(0, nowUs - this.#measuredUs - believedUs) / halfLifeUs);
    const measured = this.bytesPerUs;
    const rate = measured < bytesPerUs ? bytesPerUs * (measured / bytesPerUs) ** belief : measured;
    const waitUs = Math.min(this.#latencyUs, latencyUs) + Math.max(0, this.#latencyUs - latencyUs) * belief;
    return Math.ceil(waitUs + (bytes + aheadBytes) / rate);
  }
}
