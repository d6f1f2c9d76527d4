/**
 * Whether a server's clock went ahead of ours between two looks at it: leases ended then whose owners were not late. What an answer took
 * is never held against the clock: the server read it at some moment between the question and the answer.
 */

/** More than two machines' clocks drift apart in an outage of minutes. */
const driftMs = 100;

export class ServerClock {
  #last: { readonly askedMs: number; readonly serverMs: number } | undefined;

  /** It said `serverMs` to what was asked at `askedMs` and answered at `answeredMs`, on the clock of performance.now(). */
  wentAhead(serverMs: number, askedMs: number, answeredMs: number): boolean {
    const last = this.#last;
    this.#last = { askedMs, serverMs };
    return last !== undefined && serverMs - last.serverMs > answeredMs - last.askedMs + driftMs;
  }
}
