/**
 * Tiers: the interface, the arena, the disk, codecs. Apart, so that a node loads only the code of the tiers it is configured with:
 * `@kvtier/tiers/peer`, `@kvtier/tiers/redis`, `@kvtier/tiers/s3`.
 */

export { ArenaMemory } from './arena-memory.ts';
export { type ArenaBlock, ArenaTier, type ArenaTierOptions, type BlockFields } from './arena-tier.ts';
export { type CodecName, CodecTier, type CodecTierOptions, codecNames } from './codec/codec-tier.ts';
export { DiskTier } from './disk/disk-tier.ts';
export { type ArenaSlots, type DiskLog, type DiskTierOptions, planCapacity } from './disk/options.ts';
export type { DiskStep } from './disk/segment-pool.ts';
export { Followers, followInPages, followInSlices, pagesOfMap } from './followers.ts';
export type { PeerAddress, PeerSecurity } from './peer/index.ts';
export type { RedisSettings } from './redis/settings.ts';
export type { S3Settings } from './s3/options.ts';
export { Slices, slicing } from './slices.ts';
export { SlotAllocator } from './slot-allocator.ts';
export type * from './tier.ts';
export { verifyBlocks } from './verify-blocks.ts';
export { Watch } from './watch.ts';
