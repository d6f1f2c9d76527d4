/** Tiers: the interface, the arena, and what lies below it. */
export { type ArenaBlock, ArenaTier, type ArenaTierOptions, type BlockFields } from './arena-tier.ts';
export { type DiskLog, DiskTier, type DiskTierOptions, planCapacity } from './disk/disk-tier.ts';
export type { DiskStep } from './disk/segment-pool.ts';
export { SlotAllocator } from './slot-allocator.ts';
export type * from './tier.ts';
