/**
 * The engine's own cache: hashed blocks (`kv-cache-manager.ts`) or a radix tree of tokens (`radix/`). Complete for vLLM's kinds of
 * attention, each with a manager of its own, and with what its manager can do; the engine uses two of them, full attention and sliding
 * windows.
 */
export { type BlockPolicyName, blockPolicyNames } from '@kvtier/eviction';
export type * from './attention-spec.ts';
export { type BlockPoolOptions, nullBlock, type PartialBlock } from './block-pool.ts';
export type { CacheHit, ConnectorHit, Coordinator, GroupBlocks } from './coordinator.ts';
export {
  type AllBlocksCleared,
  type BlockRemoved,
  type BlockStored,
  EventLog,
  type KvCacheEvent,
  type PackedEvents,
} from './events.ts';
export type { FullBlocks } from './full-blocks.ts';
export { KvCacheManager, type KvCacheManagerOptions } from './kv-cache-manager.ts';
export {
  type AllocateOptions,
  type PrefixCache,
  type PrefixCacheKind,
  type PrefixCacheRequest,
  prefixCacheKinds,
} from './prefix-cache.ts';
export { type RadixPolicy, radixPolicies } from './radix/eviction-queue.ts';
export { RadixCache, type RadixCacheOptions } from './radix/radix-cache.ts';
export type { RadixNode } from './radix/radix-node.ts';
export type { InsertOptions, RadixInsert, RadixMatch, RadixTreeOptions } from './radix/radix-tree.ts';
export type { BlockHashes, CacheRequest, RequestDescription } from './request.ts';
export type { BlockCopy, Growth, PartialTailOffload, SingleTypeManager } from './single-type-manager.ts';
export type { PrefixCacheStatsSnapshot } from './stats.ts';
