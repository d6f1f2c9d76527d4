/**
 * Prompts that were given to a worker and are not computed yet: what it will hold. The KV index knows of it only then, and who asks about
 * the same document meanwhile would have it computed a second time elsewhere.
 *
 * They are kept in the order of their hashes, one after the other. So the neighbours of a prompt's place are those that have most of it,
 * and the farther away, the less: a look ends where nobody has more of it than is held, or after `maxLooked` on each side.
 *
 * Bounded: `maxPrompts`; who came first goes, and each when it should long be computed.
 */
import type { Keys } from '@kvtier/kv-index';
import { commonBlocks, placeOf } from './sorted-prompts.ts';

const maxPrompts = 512;
const maxLooked = 64;
/** A prompt has so many times as long as it should take, and `graceMs`; from then on what the index says is the truth. */
const patience = 2;
const graceMs = 1_000;

interface Prompt {
  /** Who wants it. */
  readonly item: unknown;
  readonly keys: Keys;
  readonly worker: number;
  /** From when on its last step runs: who comes then finds it computed. */
  readonly lastStepMs: number;
  readonly untilMs: number;
}

export class UnderWay {
  /** By their hashes. */
  readonly #sorted: Prompt[] = [];
  /** The same, as they came. */
  readonly #came: Prompt[] = [];

  /** It goes to this worker, and is computed there within `takesMs`; its last step takes `lastStepMs` of them. */
  given(item: unknown, keys: Keys, worker: number, nowMs: number, takesMs: number, lastStepMs: number): void {
    if (keys.length === 0) return;
    while (this.#came.length > 0 && (this.#came.length >= maxPrompts || this.#came[0]!.untilMs <= nowMs)) {
      const gone = this.#came.shift()!;
      this.#sorted.splice(this.#sorted.indexOf(gone), 1);
    }
    const untilMs = nowMs + graceMs + patience * takesMs;
    const prompt = { item, keys, worker, lastStepMs: nowMs + takesMs - lastStepMs, untilMs };
    this.#came.push(prompt);
    this.#sorted.splice(placeOf(this.#sorted, keys), 0, prompt);
  }

  /** Who wanted it has ended before it was computed: nobody computes it any more. */
  ended(item: unknown): void {
    this.#forget((prompt) => prompt.item === item);
  }

  /** This number stands for another worker from now on, or for none. */
  left(worker: number): void {
    this.#forget((prompt) => prompt.worker === worker);
  }

  #forget(isOver: (prompt: Prompt) => boolean): void {
    if (!this.#came.some(isOver)) return;
    for (const prompts of [this.#sorted, this.#came]) {
      const stay = prompts.filter((prompt) => !isOver(prompt));
      prompts.splice(0, prompts.length, ...stay);
    }
  }

  /**
   * Calls back for workers that will hold more than the first `least` blocks of the prompt: how many leading blocks, and from when on
   * who comes finds them. For one worker it may
   * do so several times, the most first.
   */
  each(
    keys: Keys,
    nowMs: number,
    least: number,
    onMore: (worker: number, blocks: number, lastStepMs: number) => void,
  ): void {
    if (this.#sorted.length === 0 || keys.length <= 2 * least) return;
    const place = placeOf(this.#sorted, keys);
    let before = place - 1;
    let after = place;
    const firstBefore = Math.max(place - maxLooked, 0);
    const lastAfter = Math.min(place + maxLooked, this.#sorted.length) - 1;
    const commonAt = (at: number): number => commonBlocks(keys, this.#sorted[at]!.keys);
    let commonBefore = before >= firstBefore ? commonAt(before) : 0;
    let commonAfter = after <= lastAfter ? commonAt(after) : 0;
    while (Math.max(commonBefore, commonAfter) > least) {
      const isBefore = commonBefore >= commonAfter;
      const { worker, untilMs, lastStepMs } = this.#sorted[isBefore ? before : after]!;
      if (untilMs > nowMs) onMore(worker, isBefore ? commonBefore : commonAfter, lastStepMs);
      if (isBefore) commonBefore = --before >= firstBefore ? commonAt(before) : 0;
      else commonAfter = ++after <= lastAfter ? commonAt(after) : 0;
    }
  }

  /** Leading blocks of the prompt that some worker will hold, at most. */
  mostOf(keys: Keys, nowMs: number): number {
    let most = 0;
    this.each(keys, nowMs, 0, (_worker, blocks) => {
      most = Math.max(most, blocks);
    });
    return most;
  }
}
