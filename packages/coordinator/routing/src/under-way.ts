/**
 * Prompts that were given to a worker and are not computed yet: what it will hold. The KV index knows of it only then, and who asks about
 * the same document meanwhile would have it computed a second time elsewhere.
 *
 * Bounded: `maxPrompts`; who came first goes, and each when it should long be computed.
 */
import type { Keys } from '@kvtier/kv-index';

const maxPrompts = 512;
/** A prompt has so many times as long as it should take, and `graceMs`; from then on what the index says is the truth. */
const patience = 2;
const graceMs = 1_000;

interface Prompt {
  readonly keys: Keys;
  readonly worker: number;
  readonly untilMs: number;
}

export class UnderWay {
  /** By a word of their first block's hash. */
  readonly #prompts = new Map<number, Prompt[]>();
  #count = 0;

  /** It goes to this worker, and is computed there within `takesMs`. */
  given(keys: Keys, worker: number, nowMs: number, takesMs: number): void {
    if (keys.length === 0) return;
    if (this.#count >= maxPrompts) this.#forgetFirst();
    const alike = this.#alike(keys, nowMs);
    alike.push({ keys, worker, untilMs: nowMs + graceMs + patience * takesMs });
    this.#prompts.delete(keys[0]!);
    this.#prompts.set(keys[0]!, alike);
    this.#count++;
  }

  /**
   * Calls back for each worker that will hold more of the prompt than it does: how many leading blocks. `heldBy`: how many it holds;
   * undefined: it may not have the prompt.
   */
  each(
    keys: Keys,
    nowMs: number,
    heldBy: (worker: number) => number | undefined,
    onMore: (worker: number, blocks: number) => void,
  ): void {
    if (keys.length === 0 || !this.#prompts.has(keys[0]!)) return;
    for (const { keys: others, worker } of this.#alike(keys, nowMs)) {
      const held = heldBy(worker);
      // Of most, the beginning that they share is held already.
      if (held === undefined || !areEqual(keys, others, held)) continue;
      onMore(worker, commonBlocks(keys, others, held + 1));
    }
  }

  /** Those that begin alike and are not computed yet. */
  #alike(keys: Keys, nowMs: number): Prompt[] {
    const all = this.#prompts.get(keys[0]!) ?? [];
    const left = all.filter(({ untilMs }) => untilMs > nowMs);
    this.#count -= all.length - left.length;
    if (left.length < all.length) {
      if (left.length === 0) this.#prompts.delete(keys[0]!);
      else this.#prompts.set(keys[0]!, left);
    }
    return left;
  }

  #forgetFirst(): void {
    const [first, all] = this.#prompts.entries().next().value!;
    all.shift();
    this.#count--;
    if (all.length === 0) this.#prompts.delete(first);
  }
}

/** A chain hash names its block and all before it: where two are equal, all before them are. `least` are known to be equal. */
export function commonBlocks(a: Keys, b: Keys, least = 0): number {
  let low = least;
  let high = Math.min(a.length, b.length) / 2;
  while (low < high) {
    const middle = (low + high + 1) >>> 1;
    if (areEqual(a, b, middle - 1)) low = middle;
    else high = middle - 1;
  }
  return low;
}

const areEqual = (a: Keys, b: Keys, block: number): boolean =>
  2 * block + 1 < Math.min(a.length, b.length) &&
  a[2 * block] === b[2 * block] &&
  a[2 * block + 1] === b[2 * block + 1];
