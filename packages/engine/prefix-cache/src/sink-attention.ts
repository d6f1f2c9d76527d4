/**
 * Full attention with sink tokens: some blocks at the front are the same for every request; they are taken when the
 * manager is made and never given back. Everything else is full attention. After vLLM's SinkFullAttentionManager.
 */
import { FullAttentionManager } from './full-attention.ts';
import type { ManagerOptions } from './single-type-manager.ts';

export class SinkAttentionManager extends FullAttentionManager {
  /** Held for the life of the manager. */
  readonly sinkBlocks: readonly number[];

  constructor(options: ManagerOptions, sinkTokens: number) {
    super(options, 'sink_full_attention');
    this.sinkBlocks = this.pool.reserve(Math.ceil(sinkTokens / this.blockTokens));
  }
}
