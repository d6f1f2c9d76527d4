/**
 * Sliding-window attention: a token sees the `windowTokens` last ones, so a hit needs only the blocks of one window, and
 * blocks behind the window are let go while the request runs.
 *
 *     null null null null | b4 b5 b6 ▏        a hit of 7 blocks with a window of 3; the window ends where the hit ends
 *
 * After vLLM's SlidingWindowManager.
 */
import { nullBlock } from './block-pool.ts';
import { tailsWorthCaching } from './retention.ts';
import {
  type Hit,
  type HitQuery,
  type ManagerOptions,
  type Retention,
  SingleTypeManager,
} from './single-type-manager.ts';

export class SlidingWindowManager extends SingleTypeManager {
  readonly kind = 'sliding_window';
  readonly #windowTokens: number;

  constructor(options: ManagerOptions, windowTokens: number) {
    super(options);
    this.#windowTokens = windowTokens;
  }

  override get windowTokens(): number {
    return this.#windowTokens;
  }

  /** Right to left, until enough blocks in a row are found; a run from block 0 is enough at any length. */
  findLongestCacheHit(query: HitQuery): Hit {
    const { hashes, groups, alignmentTokens } = query;
    const dropped = query.dropEagleBlock ? 1 : 0;
    const needed = this.#windowBlocks + dropped;
    const maxBlocks = Math.min(
      Math.floor(query.maxTokens / this.blockTokens),
      Math.floor(hashes.blockCount / this.hashesPerBlock),
    );
    const columns = groups.map(() => new Array<number>(maxBlocks).fill(nullBlock));
    let run = 0;
    let count = 0;
    for (let i = maxBlocks - 1; i >= 0 && count === 0; i--) {
      const found = this.pool.findAll(hashes, this.hashIndexOf(i), groups);
      if (!found) {
        run = 0;
        continue;
      }
      if (run === 0 && ((i + 1 - dropped) * this.blockTokens) % alignmentTokens !== 0) continue;
      for (let g = 0; g < found.length; g++) columns[g]![i] = found[g]!;
      run++;
      if (run >= needed) count = i + run;
    }
    if (count === 0) count = run;
    if (count > 0) count -= dropped;
    while ((count * this.blockTokens) % alignmentTokens !== 0) count--;
    for (const column of columns) column.length = count;
    return { columns, tokens: count * this.blockTokens };
  }

  protected override skippedTokens(computedTokens: number): number {
    return Math.max(0, computedTokens - this.#windowTokens + 1);
  }

  protected override worthCaching(first: number, end: number, retention: Retention) {
    const { blockTokens, options } = this;
    const shift = options.useEagle ? 1 : 0;
    const { alignmentTokens } = options;
    return tailsWorthCaching({
      first,
      end,
      retention,
      blockTokens,
      alignmentTokens,
      tailBlocks: this.#windowBlocks + shift,
      shift,
    });
  }

  /** The window may begin inside a block: one more than it covers. */
  protected override mostBlocksAtOnce(): number {
    const { maxInFlightTokens, maxModelTokens } = this.options;
    return this.blocksFor(Math.min(this.#windowTokens - 1 + maxInFlightTokens, maxModelTokens)) + 1;
  }

  /** Blocks before a token that it sees; the token itself is in the window. */
  get #windowBlocks(): number {
    return this.blocksFor(this.#windowTokens - 1);
  }
}
