/** Tiers: the interface, the arena, and what lies below it. */

export { ArenaMemory } from './arena-memory.ts';
export { type ArenaBlock, ArenaTier, type ArenaTierOptions, type BlockFields } from './arena-tier.ts';
export { type CodecName, CodecTier, type CodecTierOptions, codecNames } from './codec/codec-tier.ts';
export { DiskTier } from './disk/disk-tier.ts';
export { type ArenaSlots, type DiskLog, type DiskTierOptions, planCapacity } from './disk/options.ts';
export type { DiskStep } from './disk/segment-pool.ts';
export { Followers } from './followers.ts';
export {
  maxPeers,
  type PeerAddress,
  PeerEngine,
  type PeerEngineOptions,
  type PeerSecurity,
  PeerServer,
  type PeerServerOptions,
  PeerTier,
  type PeerTierOptions,
} from './peer/index.ts';
export { RedisTier } from './redis/redis-tier.ts';
export {
  defaultSettings as defaultRedisSettings,
  type RedisSettings,
  type RedisTierOptions,
} from './redis/settings.ts';
export type { S3Settings, S3TierOptions } from './s3/options.ts';
export { S3Tier } from './s3/s3-tier.ts';
export { SlotAllocator } from './slot-allocator.ts';
export type * from './tier.ts';
