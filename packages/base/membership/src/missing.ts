/**
 * Members that are told though their lease has ended, because they may live: leases end, too, that nobody could renew in time. Two
 * reasons to wait for them:
 *
 *     the servers were away, or their clock went ahead      all of them have `graceMs` to come back
 *     most members' leases end in one look, without either  those have `togetherMs`: a server that stood still a moment may have
 *                                                           answered its readers before its members
 *
 * Invariant: each has its time once, however often a reason comes again; it counts only while the servers are there for certain.
 */

/** After the servers were away: a member has reached them again by then. */
const graceMs = 2_000;
/** Of a lease of 1.5 s, which is seen to have ended by the next look (200 ms), it ends within 2 s of its owner; not later than it may. */
const togetherMs = 300;

export class Missing {
  #graceEndMs = 0;
  /** By id: how long the servers have been there since its lease ended, without an end. */
  readonly #missedMs = new Map<string, number>();

  /** The servers are back, or their clock is another one. */
  beginGrace(nowMs: number): void {
    this.#graceEndMs = nowMs + graceMs;
  }

  /**
   * Of `gone`, whose leases have ended by this look, those that are still told. `told`: so many there are with them. `thereMs`: so long
   * the servers have been there for certain since the look before.
   */
  held<T extends { readonly id: string; readonly isLeaving: boolean }>(
    gone: readonly T[],
    told: number,
    thereMs: number,
    nowMs: number,
  ): T[] {
    const before = new Map(this.#missedMs);
    this.#missedMs.clear();
    const isGrace = nowMs < this.#graceEndMs;
    const together = gone.filter(({ id, isLeaving }) => !isLeaving && !before.has(id)).length;
    const isTogether = together >= 2 && together * 2 > told;
    return gone.filter(({ id, isLeaving }) => {
      const beforeMs = before.get(id);
      const sumMs = beforeMs === undefined ? 0 : beforeMs + thereMs;
      const isWaitedFor = isTogether ? !isLeaving : beforeMs !== undefined;
      // Servers that come and go would give it a new time each time.
      // The next look, which comes as late as this one, would be too late.
      if (isGrace ? sumMs >= graceMs : !isWaitedFor || sumMs + thereMs > togetherMs) return false;
      this.#missedMs.set(id, sumMs);
      return true;
    });
  }
}
