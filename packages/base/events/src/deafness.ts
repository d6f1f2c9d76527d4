/**
 * Whether a connection that stands is deaf: its publisher speaks, as probes show again and again, and nothing of that comes by it. ZeroMQ does
 * not notice where its own other end still answers. Pure: time is an argument. A publisher that says nothing is never taken for one; one whose
 * words come by probes alone, whatever is done, costs a connection a minute.
 */

/** So many probes brought what should have come, and nothing came since the first of them. */
const mostMissed = 2;
/** What a new connection may miss, as its subscription is under way. */
const settleMs = 1_000;
/** Between two connections that are made for this; twice as long after each that heard nothing. */
export const firstAnewMs = 5_000;
export const maxAnewMs = 60_000;

export class Deafness {
  #missed = 0;
  #connectedMs = Number.POSITIVE_INFINITY;
  #anewMs = Number.NEGATIVE_INFINITY;
  #pauseMs = firstAnewMs / 2;

  /** Something came by the connection. */
  heard(): void {
    this.#missed = 0;
    this.#pauseMs = firstAnewMs / 2;
  }

  connected(nowMs: number): void {
    this.#missed = 0;
    this.#connectedMs = nowMs;
  }

  /** A probe that began at `sinceMs` brought so many batches that should have come by the connection. */
  probed(sinceMs: number, batches: number): void {
    if (batches > 0 && sinceMs - this.#connectedMs >= settleMs) this.#missed++;
  }

  /** Whether to connect anew now. True once: until there is a connection again, and a while after it. */
  isDue(nowMs: number): boolean {
    if (this.#missed < mostMissed || nowMs - this.#anewMs < this.#pauseMs) return false;
    this.#missed = 0;
    this.#anewMs = nowMs;
    this.#pauseMs = Math.min(2 * this.#pauseMs, maxAnewMs);
    this.#connectedMs = Number.POSITIVE_INFINITY;
    return true;
  }
}
