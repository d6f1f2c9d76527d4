/**
 * Tiers: the interface, the arena, the disk, codecs. Apart, so that a node loads only the code of the tiers it is configured with:
 * `@kvtier/tiers/peer`, `@kvtier/tiers/redis`, `@kvtier/tiers/s3`.
 *
 * What they share is in `kit`: where rows of large tables are found (`kit/row-slots.ts`), what is told in one turn (`kit/turn-share.ts`),
 * what is passed over (`kit/passing-over.ts`). What goes next of an arena, and of which sizes: `arena/size-class.ts`,
 * `arena/size-classes.ts`. Of the disk, one life of a device, whose folder it is and where that lies: `disk/device-life.ts`,
 * `disk/folder-lock.ts`, `disk/folder-mounts.ts`.
 */

export type { ArenaBlock, BlockFields } from './arena/arena-block.ts';
export { ArenaMemory } from './arena/arena-memory.ts';
export { ArenaTier, type ArenaTierOptions } from './arena/arena-tier.ts';
export { SlotAllocator } from './arena/slot-allocator.ts';
export { type CodecName, CodecTier, type CodecTierOptions, codecNames } from './codec/codec-tier.ts';
export { DiskTier } from './disk/disk-tier.ts';
export { FolderMounts, isOnRoot } from './disk/folder-mounts.ts';
export type { DiskStep } from './disk/options.ts';
export { type ArenaSlots, type DiskTierOptions, placesOf, planCapacity } from './disk/options.ts';
export { Followers, followInPages, followInSlices } from './kit/followers.ts';
export { roomAsks, victimPassingOver } from './kit/passing-over.ts';
export { RowSlots } from './kit/row-slots.ts';
export { Slices, slicing } from './kit/slices.ts';
export type * from './kit/tier.ts';
export { verifyBlocks } from './kit/verify-blocks.ts';
export type { PeerAddress, PeerSecurity } from './peer/index.ts';
export type { RedisSettings } from './redis/settings.ts';
export type { S3Settings } from './s3/options.ts';
