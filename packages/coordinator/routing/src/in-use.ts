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
  readonly #workers: (Prompt[] | undefined)[] = [];
  /** By what was given: the prompts of its worker, and its own among them. */
  readonly #given = new Map<unknown, { readonly prompts: Prompt[]; readonly prompt: Prompt }>();

  given(item: unknown, keys: Keys, worker: number): void {
    this.ended(item);
    if (keys.length === 0) return;
    const prompt = { keys };
    this.#workers[worker] ??= [];
    const prompts = this.#workers[worker]!;
    prompts.splice(placeOf(prompts, keys), 0, prompt);
    this.#given.set(item, { prompts, prompt });
  }

  ended(item: unknown): void {
    const given = this.#given.get(item);
    if (given === undefined) return;
    this.#given.delete(item);
    const { prompts, prompt } = given;
    // It lies among equal ones, before the place of the next.
    let at = placeOf(prompts, prompt.keys) - 1;
    while (at >= 0 && prompts[at] !== prompt) at--;
    if (at >= 0) prompts.splice(at, 1);
  }

  /** This number stands for another worker from now on, or for none. What was given ends all the same: of a list that nobody asks. */
  left(worker: number): void {
    this.#workers[worker] = undefined;
  }

  /** Leading blocks of the prompt that the worker's requests have, at most. */
  blocksOf(keys: Keys, worker: number): number {
    const prompts = this.#workers[worker] ?? [];
    const place = placeOf(prompts, keys);
    const neighbours = [prompts[place - 1], prompts[place]];
    return Math.max(...neighbours.map((one) => (one === undefined ? 0 : commonBlocks(keys, one.keys))));
  }
}
