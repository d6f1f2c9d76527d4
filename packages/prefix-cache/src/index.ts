export type * from './attention-spec.ts';
export { BlockPool, type BlockPoolOptions, type FullBlocks, nullBlock, type PartialBlock } from './block-pool.ts';
export type { CacheHit, Coordinator, GroupBlocks } from './coordinator.ts';
export type { AllBlocksCleared, BlockRemoved, BlockStored, KvCacheEvent } from './events.ts';
export { FreeQueue } from './free-queue.ts';
export { type AllocateOptions, KvCacheManager, type KvCacheManagerOptions } from './kv-cache-manager.ts';
export type { BlockHashes, CacheRequest, RequestDescription } from './request.ts';
export type { BlockCopy, Growth, SingleTypeManager } from './single-type-manager.ts';
export type { PrefixCacheStatsSnapshot } from './stats.ts';
