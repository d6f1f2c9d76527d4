/**
 * Calls that run in libuv's pool, few at a time. The pool has four threads for all of the process (files, DNS, TLS, whatever a library puts
 * there), so that whoever puts many calls in it stands before all others.
 *
 * Invariants: at most `most` run at once; at most `mostWaiting` wait, of each urgency; what is urgent (somebody waits for a load) begins before
 * all that is not (write-down).
 */

interface Waiting {
  begin(): void;
}

export class PoolTurns {
  readonly #most: number;
  readonly #mostWaiting: number;
  readonly #urgent: Waiting[] = [];
  readonly #others: Waiting[] = [];
  #running = 0;

  constructor(most: number, mostWaiting: number) {
    this.#most = most;
    this.#mostWaiting = mostWaiting;
  }

  get running(): number {
    return this.#running;
  }

  get waiting(): number {
    return this.#urgent.length + this.#others.length;
  }

  /** What `call` gives; undefined, and it is not called: too many wait. */
  run<T>(call: () => Promise<T>, isUrgent: boolean): Promise<T> | undefined {
    const queue = isUrgent ? this.#urgent : this.#others;
    if (this.#running >= this.#most && queue.length >= this.#mostWaiting) return undefined;
    return new Promise<T>((resolve, reject) => {
      const begin = (): void => {
        this.#running++;
        let running: Promise<T>;
        try {
          running = call();
        } catch (error) {
          running = Promise.reject(error as Error);
        }
        running.then(resolve, reject).finally(() => this.#ended());
      };
      if (this.#running < this.#most) begin();
      else queue.push({ begin });
    });
  }

  #ended(): void {
    this.#running--;
    (this.#urgent.shift() ?? this.#others.shift())?.begin();
  }
}
