/**
 * Work that is too much for one turn of the event loop: it is done a slice at a time, one slice a turn.
 * Invariant: however many jobs there are, they take no more of a turn than one slice; each gets its share, in the order in which
 * they came.
 */

/** Blocks that are dealt with in one slice: some milliseconds. (The simulation makes it a few.) */
export const slicing = { blocks: 1024 };

/** Does one slice. False: that was the last one. */
export type Slice = () => boolean;

export class Slices {
  /** In the order of their next turns. */
  readonly #jobs = new Set<Slice>();
  #immediate: NodeJS.Immediate | undefined;

  get idle(): boolean {
    return this.#jobs.size === 0;
  }

  /** `slice` is called in turns to come, until it returns false. Once, however often it was added. */
  add(slice: Slice): void {
    this.#jobs.add(slice);
    this.#immediate ??= setImmediate(() => this.#turn());
  }

  /** It is not called any more. */
  remove(slice: Slice): void {
    this.#jobs.delete(slice);
  }

  /** None is called any more. */
  clear(): void {
    this.#jobs.clear();
    clearImmediate(this.#immediate);
    this.#immediate = undefined;
  }

  #turn(): void {
    this.#immediate = undefined;
    const [slice] = this.#jobs;
    if (slice === undefined) return;
    this.#jobs.delete(slice);
    if (slice()) this.#jobs.add(slice);
    if (this.#jobs.size > 0) this.#immediate ??= setImmediate(() => this.#turn());
  }
}
