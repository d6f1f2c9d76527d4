/**
 * Bodies that wait for a thread, first come, first served, and which thread may take which:
 *
 *   first thread    small ones, and never a large one
 *   the others      any, but of a small one that the first will have read in a moment they keep away
 *
 * Who reads large bodies stands back in the queue for a CPU, so where the CPUs are busy a small body is read later by an idle thread of
 * these than behind another small one. It takes one that has waited for `helpMs`: the first thread is held up, or there is too much for it.
 */

/** Bodies up to here go to any thread, larger ones not to the first. */
export const smallBodyBytes = 256 << 10;
/** Ten times what a small body usually takes. */
export const helpMs = 5;

interface Queued<Job> {
  readonly job: Job;
  readonly bytes: number;
  readonly sinceMs: number;
  /** Only this one may take it. */
  readonly thread: object | undefined;
}

export interface Taker {
  readonly takesLarge: boolean;
  /** Whether another one reads small bodies before it does. */
  readonly isHelper: boolean;
}

export class TextQueue<Job> {
  readonly #queued: Queued<Job>[] = [];

  get length(): number {
    return this.#queued.length;
  }

  push(job: Job, bytes: number, nowMs: number, thread?: object): void {
    this.#queued.push({ job, bytes, sinceMs: nowMs, thread });
  }

  /** The next for an idle thread. */
  take(taker: Taker, nowMs: number): Job | undefined {
    const at = this.#queued.findIndex((queued) => mayTake(taker, queued, nowMs));
    return at === -1 ? undefined : this.#queued.splice(at, 1)[0]!.job;
  }

  /** In how many milliseconds a helper may take the next small one; undefined: none waits for that. */
  helpIn(nowMs: number): number | undefined {
    const small = this.#queued.find(({ bytes, thread }) => thread === undefined && bytes <= smallBodyBytes);
    return small === undefined ? undefined : Math.max(0, small.sinceMs + helpMs - nowMs);
  }

  /** False: it is not there any more. */
  remove(job: Job): boolean {
    const at = this.#queued.findIndex((queued) => queued.job === job);
    if (at !== -1) this.#queued.splice(at, 1);
    return at !== -1;
  }

  takeAll(): Job[] {
    return this.#queued.splice(0).map(({ job }) => job);
  }
}

function mayTake(taker: Taker, { bytes, sinceMs, thread }: Queued<unknown>, nowMs: number): boolean {
  if (thread !== undefined) return thread === taker;
  if (bytes > smallBodyBytes) return taker.takesLarge;
  return !taker.isHelper || nowMs - sinceMs >= helpMs;
}
