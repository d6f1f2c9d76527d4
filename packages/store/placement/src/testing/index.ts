/** For tests: doubles, rigs and what else of this room they look at. */
export { Awaiting } from '../awaiting.ts';
export { BlockTurns } from '../block-turns.ts';
export { Counters } from '../counters.ts';
export { Deadlines } from '../deadlines.ts';
export { Load } from '../load.ts';
export { Pins } from '../pins.ts';
export { Residency } from '../residency.ts';
export { SessionWrites } from '../session-writes.ts';
export { Tenants } from '../tenants.ts';
export { TierTtl } from '../tier-ttl.ts';
export { Bench } from './bench.ts';
export { ManualClock, ModelArena, SteppedTier, settled, silent } from './model.ts';
