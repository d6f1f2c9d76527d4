/**
 * Whose turn it is to be stored. A step that fills a block of each of its sequences offers as many pieces at once; `maxStores` are under
 * way at a time, and the others wait. None is left out: without its block all that follow it in its chain are never found.
 *
 * Invariants: each begins exactly once, in the order in which they came. Whoever adds bounds what waits (the connector: in blocks).
 */

/** Frames of one session that wait for the node are bounded, and loads need theirs. */
const maxStores = 64;

/** Never rejects. The first part of it, its Reserve, is on its way when it returns. */
export type BeginStore = () => Promise<void>;

export class StoreTurns {
  readonly #waiting: BeginStore[] = [];
  #running = 0;
  #whenDone: (() => void)[] = [];

  /** Begins now if it may. */
  add(begin: BeginStore): void {
    this.#waiting.push(begin);
    this.#goOn();
  }

  /** Resolves when none is under way and none waits. */
  done(): Promise<void> {
    if (this.#running === 0) return Promise.resolve();
    return new Promise((resolve) => this.#whenDone.push(resolve));
  }

  #goOn(): void {
    while (this.#running < maxStores) {
      const begin = this.#waiting.shift();
      if (begin === undefined) break;
      this.#running++;
      void begin().then(() => {
        this.#running--;
        this.#goOn();
      });
    }
    if (this.#running === 0) for (const resolve of this.#whenDone.splice(0)) resolve();
  }
}
