/**
 * When the queues are looked at: soon after news of a worker, a slice of a turn at a time, and seldom while nothing comes of it.
 *
 *     news ─► glance: has a worker opened? ─► look, for `sliceMs` at most ─► something was given: the next one `lookMs` later
 *                       └► no: once the pause is over                     └► nothing: a pause, `pauseShare` times what it took
 *
 * Where a thousand workers tell their loads there is news all the time, and looks at those that nobody can take now would have most of
 * the process. A worker that opens ends the pause, so that nobody waits for a look who could be served; but for as long as the last look took.
 *
 * A look that is cut goes on in the next ones, and those that were looked at first do not see what has come since. So where there was
 * news meanwhile, another look follows the last of them.
 */

/** Between two glances. */
const lookMs = 2;
/** After so much of one look each queue looks at one request at most, and the next look goes on with it. */
const sliceMs = 5;
/** Looks that give nothing have a fifth of the process at most. */
const pauseShare = 4;
const maxPauseMs = 25;

/** What a look did. */
export interface Looked {
  readonly hasGiven: boolean;
  /** Some that wait were not looked at yet, whether or not a worker is open now; and some of them could be given to one that is. */
  readonly isMidway: boolean;
  readonly isCut: boolean;
}

export interface QueueLooksOptions {
  /** Somebody waits. */
  readonly isWanted: () => boolean;
  /** Reads the workers' loads; true: one is open that was not at the last look. */
  readonly glance: () => boolean;
  readonly look: (isOver: () => boolean) => Looked;
}

export class QueueLooks {
  readonly #options: QueueLooksOptions;
  #glancedAtMs = Number.NEGATIVE_INFINITY;
  /** Of the last look, if it gave nothing. */
  #endedAtMs = Number.NEGATIVE_INFINITY;
  #tookMs = 0;
  /** Of the last look; and whether there was news since the first one that went on from there. */
  #isMidway = false;
  #hasNews = false;
  /** Takes back the next glance; undefined: none is to come. */
  #stop: (() => void) | undefined;
  #dueMs = 0;
  #closed = false;

  constructor(options: QueueLooksOptions) {
    this.#options = options;
  }

  /** There is news: soon, if somebody waits. */
  wake(): void {
    this.#hasNews = this.#isMidway;
    this.#soon();
  }

  close(): void {
    this.#closed = true;
    this.#stop?.();
  }

  #soon(): void {
    this.#at(this.#glancedAtMs + lookMs);
  }

  #at(dueMs: number): void {
    if (this.#closed || !this.#options.isWanted()) return;
    if (this.#stop !== undefined) {
      if (this.#dueMs <= dueMs) return;
      this.#stop();
    }
    this.#dueMs = dueMs;
    const inMs = dueMs - performance.now();
    const glance = (): void => {
      this.#stop = undefined;
      this.#glance();
    };
    // Each by its own: a timer that is taken back as an immediate stops all immediates of the process.
    if (inMs <= 0) {
      const immediate = setImmediate(glance);
      this.#stop = () => clearImmediate(immediate);
    } else {
      const timer = setTimeout(glance, inMs);
      this.#stop = () => clearTimeout(timer);
    }
  }

  #glance(): void {
    const beginMs = performance.now();
    const share = this.#options.glance() ? 1 : pauseShare;
    const dueMs = this.#endedAtMs + Math.min(share * this.#tookMs, maxPauseMs);
    if (beginMs < dueMs) {
      this.#glancedAtMs = performance.now();
      this.#at(dueMs);
      return;
    }
    const { hasGiven, isCut, isMidway } = this.#options.look(() => performance.now() - beginMs > sliceMs);
    this.#glancedAtMs = performance.now();
    this.#endedAtMs = this.#glancedAtMs;
    this.#tookMs = hasGiven ? 0 : this.#endedAtMs - beginMs;
    const isOver = this.#hasNews && !isMidway;
    if (isOver) this.#hasNews = false;
    this.#isMidway = isMidway;
    if (isCut || isOver) this.#soon();
  }
}

/** Never the first time: each queue comes on a little in each look. */
export function afterFirst(isOver: () => boolean): () => boolean {
  let asked = 0;
  return () => asked++ > 0 && isOver();
}
