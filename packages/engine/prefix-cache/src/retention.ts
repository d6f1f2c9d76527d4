/**
 * Which blocks a sparse group (window, state) makes findable. A hit can only end at certain boundaries, and there it needs
 * only the blocks just before: the tail. Everything else would fill the cache with blocks that no lookup can use.
 *
 *     boundaries    ·   ·   ·   B   ·   ·   ·   B
 *     blocks        0   1   2   3   4   5   6   7         with tails of two blocks, 2, 3, 6 and 7 are kept
 *
 * With a retention interval the boundaries are its multiples and those that a request names (the end of its prompt, a
 * junction with another one); with interval 0 only the latter. After the reachable_block_mask of vLLM's managers.
 */
import type { Retention } from './single-type-manager.ts';

export interface TailQuery {
  readonly first: number;
  readonly end: number;
  readonly retention: Retention;
  readonly blockTokens: number;
  /** A hit ends on a multiple of this. */
  readonly alignmentTokens: number;
  /** Blocks that a hit needs before its end. */
  readonly tailBlocks: number;
  /** Blocks that the tail reaches beyond the boundary: the one that a draft model drops again. */
  readonly shift: number;
}

/** A predicate over block indexes first..end-1; undefined: keep all. */
export function tailsWorthCaching(query: TailQuery): ((i: number) => boolean) | undefined {
  const { retention, blockTokens, alignmentTokens, tailBlocks, shift } = query;
  const { intervalTokens, boundaries } = retention;
  const strideBlocks = (intervalTokens ?? alignmentTokens) / blockTokens;
  if (intervalTokens !== 0 && tailBlocks >= strideBlocks) return undefined;
  // The tail of a boundary at block e is the blocks e + shift - tailBlocks .. e + shift - 1; boundaries start at the first stride.
  const inStride = (i: number): boolean => {
    if (intervalTokens === 0) return false;
    const next = Math.max(Math.ceil((i + 1 - shift) / strideBlocks), 1) * strideBlocks;
    return i >= next + shift - tailBlocks;
  };
  if (intervalTokens === undefined) return inStride;
  const ends = boundaries.map((tokens) => (tokens - (tokens % alignmentTokens)) / blockTokens).filter((end) => end > 0);
  return (i) => inStride(i) || ends.some((end) => i < end + shift && i >= end + shift - tailBlocks);
}
