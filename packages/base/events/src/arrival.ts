/**
 * Waits for what may be long in coming, or for a word that there is something else to do meanwhile, any number of times. A promise keeps
 * each reaction that it was ever given until it settles: a race begun anew after each word would grow with the words. So it gets one.
 */
export class Arrival<T> {
  #awaited: Promise<T> | undefined;
  /** It is there: what takes it out, or throws what came in its place. */
  #take: (() => T) | undefined;
  #wake: (() => void) | undefined;

  /** Something is awaited, or there. */
  get isBegun(): boolean {
    return this.#awaited !== undefined;
  }

  /** What was awaited before is awaited no more. */
  begin(awaited: Promise<T>): void {
    this.drop();
    this.#awaited = awaited;
    const came = (take: () => T): void => {
      if (this.#awaited !== awaited) return;
      this.#take = take;
      this.wake();
    };
    awaited.then(
      (value) => came(() => value),
      (error) =>
        came(() => {
          throw error;
        }),
    );
  }

  drop(): void {
    this.#awaited = undefined;
    this.#take = undefined;
  }

  /** Whoever waits goes on. */
  wake(): void {
    this.#wake?.();
  }

  /** Until it is there, or until `wake`. */
  async wait(): Promise<void> {
    if (this.#take !== undefined) return;
    await new Promise<void>((resolve) => {
      this.#wake = resolve;
    });
    this.#wake = undefined;
  }

  /** Takes it; undefined: it is not there yet. @throws what came in its place */
  take(): T | undefined {
    const take = this.#take;
    if (take === undefined) return undefined;
    this.drop();
    return take();
  }
}
