/**
 * Requests of peers for which no slot may be lent just now: they wait, first come first served, until slots come back. Invariants: the line
 * is bounded, and nobody stands in it for longer than `limitMs`, far less than what a peer that fetches allows an answer to take.
 */
import type { PeerRequest } from './peer-loops.ts';

interface Waiting {
  readonly request: PeerRequest;
  readonly slotBytes: number;
  readonly untilMs: number;
}

/** Of a tier that fetches from two holders in turn the first one's deadline is 2.5 s (`readLimitMs` of peer-tier.ts, half of it). */
const defaultLimitMs = 500;
/** Of all peers together; a connection has 1,024 requests at most. */
const defaultMaxWaiting = 8_192;

export class LendingLine {
  readonly #giveUp: (request: PeerRequest) => void;
  readonly #limitMs: number;
  readonly #maxWaiting: number;
  #waiting: Waiting[] = [];
  #timer: NodeJS.Timeout | undefined;
  #ended = false;

  /** `giveUp`: of one that waited in vain. */
  constructor(
    giveUp: (request: PeerRequest) => void,
    { limitMs = defaultLimitMs, maxWaiting = defaultMaxWaiting } = {},
  ) {
    this.#giveUp = giveUp;
    this.#limitMs = limitMs;
    this.#maxWaiting = maxWaiting;
  }

  get length(): number {
    return this.#waiting.length;
  }

  /** False: the line is full, or has ended. */
  add(request: PeerRequest, slotBytes: number): boolean {
    if (this.#ended || this.#waiting.length >= this.#maxWaiting) return false;
    this.#waiting.push({ request, slotBytes, untilMs: performance.now() + this.#limitMs });
    this.#watch();
    return true;
  }

  /** The first ones that `roomBytes` of slots are enough for; with `always` one at least. */
  take(roomBytes: number, always: boolean): PeerRequest[] {
    let [count, left] = [0, roomBytes];
    for (const { slotBytes } of this.#waiting) {
      if (slotBytes > left && !(always && count === 0)) break;
      left -= slotBytes;
      count++;
    }
    const taken = this.#waiting.splice(0, count).map(({ request }) => request);
    this.#watch();
    return taken;
  }

  /** All that wait are given up, and nobody is taken in any more. */
  end(): void {
    this.#ended = true;
    const left = this.#waiting.splice(0);
    this.#watch();
    for (const { request } of left) this.#giveUp(request);
  }

  /** The first one's time is over first. */
  #watch(): void {
    const first = this.#waiting[0];
    if (first === undefined) {
      clearTimeout(this.#timer);
      this.#timer = undefined;
      return;
    }
    this.#timer ??= setTimeout(() => this.#expire(), Math.max(1, first.untilMs - performance.now()));
  }

  #expire(): void {
    this.#timer = undefined;
    const nowMs = performance.now();
    const over = this.#waiting.findIndex(({ untilMs }) => untilMs > nowMs);
    const late = this.#waiting.splice(0, over < 0 ? this.#waiting.length : over);
    this.#watch();
    for (const { request } of late) this.#giveUp(request);
  }
}
