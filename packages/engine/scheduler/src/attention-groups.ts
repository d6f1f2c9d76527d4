/**
 * The model's attention groups as the KV-cache manager takes them, and how long a sequence the pool then holds: groups
 * share its blocks, those with a sliding window take a bounded number of them, the others one per block of tokens.
 *
 * Invariant: a sequence of `longestSequence` tokens can be computed to its end when it is alone.
 */
import type { Executor, KvLayout } from '@kvtier/executor';
import type { FullAttentionSpec, SlidingWindowSpec } from '@kvtier/prefix-cache';

export type GroupSpec = FullAttentionSpec | SlidingWindowSpec;

export function attentionSpecs({ blockTokens, groups }: KvLayout): GroupSpec[] {
  if (!groups) return [{ kind: 'full_attention', blockTokens }];
  return groups.map(({ windowTokens }) =>
    windowTokens > 0 ? { kind: 'sliding_window', blockTokens, windowTokens } : { kind: 'full_attention', blockTokens },
  );
}

/** Blocks that a sequence of so many tokens holds at any one time, at most, in all groups. `maxStepTokens`: computed per step. */
export function mostBlocks(
  groups: readonly GroupSpec[],
  blockTokens: number,
  maxStepTokens: number,
): (tokens: number) => number {
  // The window may begin inside a block, and a step's own tokens come on top of it.
  const bounds = groups.map((group) =>
    'windowTokens' in group
      ? Math.ceil((group.windowTokens - 1 + maxStepTokens) / blockTokens) + 1
      : Number.POSITIVE_INFINITY,
  );
  return (tokens) => {
    const blocks = Math.ceil(tokens / blockTokens);
    let sum = 0;
    for (const bound of bounds) sum += Math.min(blocks, bound);
    return sum;
  };
}

/** Tokens, at most the model's; 0 when not even one block of them fits. `maxStepTokens`: computed per step. */
export function longestSequence(
  groups: readonly GroupSpec[],
  { model, blockCount, kv }: Pick<Executor, 'model' | 'blockCount' | 'kv'>,
  maxStepTokens: number,
): number {
  const { blockTokens } = kv;
  const needed = mostBlocks(groups, blockTokens, maxStepTokens);
  let low = 0;
  let high = Math.ceil(model.maxModelTokens / blockTokens);
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (needed(middle * blockTokens) <= blockCount - 1) low = middle;
    else high = middle - 1;
  }
  return Math.min(model.maxModelTokens, low * blockTokens);
}

export const hasWindows = (groups: readonly GroupSpec[]): boolean =>
  groups.some(({ kind }) => kind === 'sliding_window');
