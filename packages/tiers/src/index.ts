/** Tiers: the interface, the arena, and what lies below it. */
export { type ArenaBlock, ArenaTier, type ArenaTierOptions, type BlockFields } from './arena-tier.ts';
export { SlotAllocator } from './slot-allocator.ts';
export type * from './tier.ts';
