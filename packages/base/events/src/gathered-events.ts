/**
 * Events of engine steps that come faster than anybody follows them, as one batch: what a message costs (a wake-up of the socket's
 * thread, a call of the kernel, one of each follower) is more than what its events cost, and a step of many small ones would pay it every time.
 */
import type { PackedEvents } from './packed-encoder.ts';

const firstWords = 4_096;

export class GatheredEvents {
  #words = new Uint32Array(firstWords);
  #wordCount = 0;
  #count = 0;
  #kinds: PackedEvents['kinds'] = [];
  #objects: PackedEvents['objects'][number][] = [];

  /** Events. */
  get count(): number {
    return this.#count;
  }

  get wordCount(): number {
    return this.#wordCount;
  }

  /** Whether these may follow in the same batch. */
  takes({ kinds }: PackedEvents): boolean {
    return this.#count === 0 || this.#kinds === kinds;
  }

  /** Copies the words: they are another's to use again. */
  add({ words, wordCount, count, kinds, objects }: PackedEvents): void {
    const end = this.#wordCount + wordCount;
    if (end > this.#words.length) {
      const grown = new Uint32Array(Math.max(2 * this.#words.length, end));
      grown.set(this.#words.subarray(0, this.#wordCount));
      this.#words = grown;
    }
    this.#words.set(words.subarray(0, wordCount), this.#wordCount);
    this.#wordCount = end;
    this.#count += count;
    this.#kinds = kinds;
    for (const object of objects) this.#objects.push(object);
  }

  /** All of them, in their order; valid until the next `add`. */
  take(): PackedEvents {
    const taken = {
      ...{ words: this.#words, wordCount: this.#wordCount, count: this.#count },
      ...{ kinds: this.#kinds, objects: this.#objects },
    };
    this.#wordCount = 0;
    this.#count = 0;
    this.#objects = [];
    return taken;
  }
}
