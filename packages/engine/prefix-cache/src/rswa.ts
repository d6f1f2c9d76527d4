/**
 * Full attention over the prompt and a window over what was generated: a long answer keeps its whole prompt and only the
 * last `windowTokens` of itself. Hits are those of full attention, as a prompt is.
 *
 *     | prompt ■ ■ ■ ■ | null null null | ■ ■ ■          the generated blocks behind the window are let go
 *
 * Invariant: no block that holds a token of the prompt is let go while the request runs. After vLLM's RSWAManager.
 */
import { nullBlock } from './block-pool.ts';
import { FullAttentionManager } from './full-attention.ts';
import type { ManagerOptions } from './single-type-manager.ts';

export class RswaManager extends FullAttentionManager {
  readonly #windowTokens: number;

  constructor(options: ManagerOptions, windowTokens: number) {
    super(options, 'rswa');
    this.#windowTokens = windowTokens;
  }

  override get windowTokens(): number {
    return this.#windowTokens;
  }

  /** Growing lets blocks go. */
  override hasRoom(): boolean {
    return false;
  }

  override removeSkippedBlocks(requestId: string, processedTokens: number, promptTokens?: number): void {
    if (promptTokens === undefined) return;
    const seen = Math.max(promptTokens, processedTokens - this.#windowTokens);
    this.removeBlocks(requestId, this.blocksFor(promptTokens), Math.floor(seen / this.blockTokens));
  }

  /** What is null was let go: nobody looks at it. */
  override covers(requestId: string, tokens: number): boolean {
    const blocks = this.table(requestId);
    const first = Math.max(Math.floor((tokens - this.#windowTokens) / this.blockTokens), 0);
    return blocks.length * this.blockTokens >= tokens && blocks[0] !== nullBlock && !blocks.includes(nullBlock, first);
  }
}
