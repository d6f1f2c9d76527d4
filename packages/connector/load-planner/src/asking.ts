/**
 * Whether to ask for what only peers hold: a lookup costs the way to a process that sleeps, which is a tenth of a short prompt. Where
 * the last answer says that peers are slower than computing, the next one would say the same. It is asked again now and then, ever
 * less often: links become faster.
 */

/** Of its time: what would still be slower than computing when it took only so much is not asked for. */
const clearlySlower = 0.75;
/** The same where the head of it may be computed meanwhile: a load that takes four times as long saves a fifth still. */
const clearlySlowerIdle = 0.25;
const againMs = { first: 1_000, most: 60_000 };

export class Asking {
  /** Per block, as it was last expected; 0: nobody has said anything. */
  #us = 0;
  /** What was asked for while nothing else was computed was worth it, the last time. */
  #headPays = true;
  #askedAtMs = Number.NEGATIVE_INFINITY;
  #againMs = againMs.first;

  /** A block of peers is expected to take so long. */
  told(usPerBlock: number): void {
    this.#us = usPerBlock;
  }

  /** Such blocks were worth loading. */
  paid(): void {
    this.#againMs = againMs.first;
    this.#headPays = true;
  }

  /** They were not, and not even for a part of them beside the steps that compute the others. */
  paidNot(): void {
    this.#headPays = false;
  }

  /** To compute the blocks takes `computeUs`. True: to bring them would take longer still, by all that is known. Nothing changes. */
  isClearlySlower(blocks: number, computeUs: number, isIdle = false): boolean {
    return blocks * this.#us * (isIdle && this.#headPays ? clearlySlowerIdle : clearlySlower) >= computeUs;
  }

  /** The same of blocks that would be asked for. True: they are asked for now. */
  isWorth(blocks: number, computeUs: number, nowMs: number, isIdle = false): boolean {
    if (!this.isClearlySlower(blocks, computeUs, isIdle)) return true;
    if (nowMs - this.#askedAtMs < this.#againMs) return false;
    this.#askedAtMs = nowMs;
    this.#againMs = Math.min(againMs.most, 2 * this.#againMs);
    return true;
  }
}
