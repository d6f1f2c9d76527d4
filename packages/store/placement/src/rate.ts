/**
 * How fast a tier delivers, measured while it is busy: bytes that arrived ÷ time during which at least one read was in
 * flight, smoothed over reads. Parallel reads are counted once in time, so the figure is the tier's and not one read's.
 */
const smoothing = 0.25;

export class RateMeter {
  #bytesPerUs: number;
  #latencyUs: number;
  #inFlight = 0;
  #lastUs = 0;

  /** The figures to believe until the first read has ended. */
  constructor(initial: { readonly bytesPerUs: number; readonly latencyUs: number }) {
    this.#bytesPerUs = initial.bytesPerUs;
    this.#latencyUs = initial.latencyUs;
  }

  /** A read starts now; call `end` with its start time. */
  start(nowUs: number): void {
    if (this.#inFlight++ === 0) this.#lastUs = nowUs;
  }

  /** A read ended with `bytes` (0: it failed and says nothing about the rate). */
  end(nowUs: number, startUs: number, bytes: number): void {
    this.#inFlight--;
    const busyUs = Math.max(1, nowUs - this.#lastUs);
    this.#lastUs = nowUs;
    if (bytes === 0) return;
    this.#bytesPerUs += smoothing * (bytes / busyUs - this.#bytesPerUs);
    const latencyUs = Math.max(0, nowUs - startUs - bytes / this.#bytesPerUs);
    this.#latencyUs += smoothing * (latencyUs - this.#latencyUs);
  }

  get bytesPerUs(): number {
    return this.#bytesPerUs;
  }

  /** Expected time for `bytes`, with `aheadBytes` in the queue before them. */
  estimateUs(bytes: number, aheadBytes: number): number {
    return bytes === 0 ? 0 : Math.ceil(this.#latencyUs + (bytes + aheadBytes) / this.#bytesPerUs);
  }
}
