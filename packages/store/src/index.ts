export { Counters } from './counters.ts';
export { type Failpoint, type FailpointStep, failpointFromEnv, failpointSteps } from './failpoints.ts';
export { Holdings, type Reservation, type ReserveStatus } from './holdings.ts';
export { defaultLimits, type StoreLimits } from './limits.ts';
export type { LoadEvents, LoadReason } from './load.ts';
export type { ArenaBlock, ArenaTop, BlockFields, Clock, Log, ReadHeader } from './ports.ts';
export { systemClock } from './ports.ts';
export type { Chain, PackedHashes } from './residency.ts';
export { type LookupResult, Store, type StoreOptions, type TierSpan } from './store.ts';
