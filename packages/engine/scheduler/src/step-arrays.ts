/**
 * The arrays of steps, used again for each: fresh ones for hundreds of sequences are hundreds of kilobytes a step, of memory that the system
 * has to map and to clear, page by page. A step gets views of exactly its size.
 *
 * Invariant: what a step was given is whole until the next one is put together, and that is when the step has ended.
 */
import type { Step } from '@kvtier/executor';

type Arrays = Pick<
  Step,
  'tokenIds' | 'queryTokens' | 'computedTokens' | 'blockTables' | 'sample' | 'temperature' | 'topK' | 'topP' | 'seed'
>;

export class StepArrays {
  readonly #tokens = new Growing((size) => new Int32Array(size));
  readonly #blockTables = new Growing((size) => new Int32Array(size));
  readonly #queryTokens = new Growing((size) => new Int32Array(size));
  readonly #computedTokens = new Growing((size) => new Int32Array(size));
  readonly #sample = new Growing((size) => new Uint8Array(size));
  readonly #temperature = new Growing((size) => new Float32Array(size));
  readonly #topK = new Growing((size) => new Int32Array(size));
  readonly #topP = new Growing((size) => new Float32Array(size));
  readonly #seed = new Growing((size) => new BigUint64Array(size));

  /** `sample` and `seed` are all 0; what else is not written holds what steps before have left. */
  take(sequences: number, tokens: number, tableEntries: number): Arrays {
    return {
      tokenIds: this.#tokens.take(tokens),
      queryTokens: this.#queryTokens.take(sequences),
      computedTokens: this.#computedTokens.take(sequences),
      blockTables: this.#blockTables.take(tableEntries),
      sample: this.#sample.take(sequences).fill(0),
      temperature: this.#temperature.take(sequences),
      topK: this.#topK.take(sequences),
      topP: this.#topP.take(sequences),
      seed: this.#seed.take(sequences).fill(0n),
    };
  }
}

interface Viewed<T> {
  readonly length: number;
  subarray(from: number, to: number): T;
}

/** One array, and its last view, which the next step mostly wants again. */
class Growing<T extends Viewed<T>> {
  readonly #make: (size: number) => T;
  #all: T;
  #view: T;

  constructor(make: (size: number) => T) {
    this.#make = make;
    this.#all = make(0);
    this.#view = this.#all;
  }

  take(size: number): T {
    if (this.#view.length === size) return this.#view;
    // With room to grow: tables of a decode get an entry more every few steps.
    if (this.#all.length < size) this.#all = this.#make(size + (size >> 1));
    this.#view = this.#all.subarray(0, size);
    return this.#view;
  }
}
