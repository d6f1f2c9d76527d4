/**
 * Cross attention: the blocks hold the encoder's output, whose size is known at admission, so they are taken once and
 * never shared, skipped or cached. After vLLM's CrossAttentionManager.
 */
import { invariant } from '@kvtier/errors';
import { type Growth, type Hit, type HitQuery, SingleTypeManager } from './single-type-manager.ts';

export class CrossAttentionManager extends SingleTypeManager {
  readonly kind = 'cross_attention';

  findLongestCacheHit({ groups }: HitQuery): Hit {
    return { columns: groups.map(() => []), tokens: 0 };
  }

  override blocksToAllocate(requestId: string, growth: Growth, computed: readonly number[]): number {
    invariant(computed.length === 0, () => `request ${requestId}: cross attention has no hits`);
    return Math.max(this.blocksFor(growth.encoderTokens) - this.table(requestId).length, 0);
  }

  override addComputedBlocks(requestId: string, _growth: Growth, computed: readonly number[]): void {
    invariant(computed.length === 0, () => `request ${requestId}: cross attention has no hits`);
  }

  override allocateExternal(): void {}

  override allocateBlocks(requestId: string, growth: Growth): number[] {
    return super.allocateBlocks(requestId, { ...growth, tokens: growth.encoderTokens });
  }

  override cacheBlocks(): void {}

  /** The encoder's output, not tokens of the request: all of it. */
  override blocksOfTokens(requestId: string): readonly number[] {
    return this.table(requestId);
  }
}
