/**
 * Prompts of requests that are at a worker: what it uses of a prompt that comes, and so needs no room for a second time. What is only cached
 * there would take room; the worker's load and the KV index do not tell the one from the other.
 *
 * Of each worker they are kept in the order of their hashes. So of all of them one of the two neighbours of a prompt's place has most of it.
 */
import type { Keys } from '@kvtier/kv-index';
import { commonBlocks, placeOf } from './sorted-prompts.ts';

interface Prompt {
  readonly keys: Keys;
}

export class InUse {
  readonly #workers: Prompt[][] = [];
  /** By what was given: where, and the prompt. */
  readonly #given = new Map<unknown, { readonly worker: number; readonly prompt: Prompt }>();

  given(item: unknown, keys: Keys, worker: number): void {
    this.ended(item);
    if (keys.length === 0) return;
    const prompt = { keys };
    this.#workers[worker] ??= [];
    const prompts = this.#workers[worker]!;
    prompts.splice(placeOf(prompts, keys), 0, prompt);
    this.#given.set(item, { worker, prompt });
  }

  ended(item: unknown): void {
    const given = this.#given.get(item);
    if (given === undefined) return;
    this.#given.delete(item);
    const prompts = this.#workers[given.worker]!;
    // Equal ones lie before the place of what is equal to them.
    let at = placeOf(prompts, given.prompt.keys) - 1;
    while (at >= 0 && prompts[at] !== given.prompt) at--;
    if (at >= 0) prompts.splice(at, 1);
  }

  /** This number stands for another worker from now on, or for none. */
  left(worker: number): void {
    this.#workers[worker] = [];
    for (const [item, given] of this.#given) if (given.worker === worker) this.#given.delete(item);
  }

  /** Leading blocks of the prompt that the worker's requests have, at most. */
  blocksOf(keys: Keys, worker: number): number {
    const prompts = this.#workers[worker];
    if (prompts === undefined || prompts.length === 0) return 0;
    const place = placeOf(prompts, keys);
    const before = place > 0 ? commonBlocks(keys, prompts[place - 1]!.keys) : 0;
    return place < prompts.length ? Math.max(before, commonBlocks(keys, prompts[place]!.keys)) : before;
  }
}
