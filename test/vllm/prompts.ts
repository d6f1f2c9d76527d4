/** Prompts with shared prefixes, the same in every run, and what a perfect cache would save of them. */
import { randomInt } from 'node:crypto';

export const blockTokens = 16;

/** Numbers that depend on the seed alone (mulberry32). */
function numbers(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let word = Math.imul(state ^ (state >>> 15), state | 1);
    word ^= word + Math.imul(word ^ (word >>> 7), word | 61);
    return (word ^ (word >>> 14)) >>> 0;
  };
}

/** So many tokens that no other seed has. */
export function fresh(seed: number, length: number): number[] {
  const draw = numbers(seed);
  return Array.from({ length }, () => 10 + (draw() % 2_000));
}

/** `count` prompts over `families` prefixes of 128 to 352 tokens, with 20 to 120 tokens of their own. */
export function prompts(count: number, families: number, seed = 1): number[][] {
  const draw = numbers(seed);
  const tokens = (length: number): number[] => Array.from({ length }, () => 10 + (draw() % 2_000));
  const prefixes = Array.from({ length: families }, () => tokens(128 + 32 * (draw() % 8)));
  return Array.from({ length: count }, () => [...prefixes[draw() % families]!, ...tokens(20 + (draw() % 101))]);
}

/** Tokens in whole blocks that a prompt can take from a cache: its last token is always computed. */
export const wholeTokens = (prompt: readonly number[]): number =>
  Math.floor((prompt.length - 1) / blockTokens) * blockTokens;

/** Tokens in whole blocks over all prompts, blocks with one chain counted once. */
export function distinctTokens(all: readonly (readonly number[])[]): number {
  const seen = new Set<string>();
  for (const prompt of all) {
    for (let end = blockTokens; end <= wholeTokens(prompt); end += blockTokens) seen.add(prompt.slice(0, end).join());
  }
  return seen.size * blockTokens;
}

/** In an order drawn by lot, another one at each call. */
export function shuffled<T>(values: readonly T[]): T[] {
  const out = [...values];
  for (let at = out.length - 1; at > 0; at--) {
    const other = randomInt(at + 1);
    [out[at], out[other]] = [out[other]!, out[at]!];
  }
  return out;
}
