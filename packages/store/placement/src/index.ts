/**
 * One index of what all tiers hold, and what follows from it: fetch, write-down, quotas, ends. Beside store, residency table and loads:
 * what is awaited (`awaiting.ts`), who may use a tier (`tier-gate.ts`, `deadlines.ts`), what engines read of it without asking
 * (`held-sketch.ts`), pins and their tickets (`session-pins.ts`), what a tenant with a quota has in a tier (`account.ts`), what a session
 * writes (`session-writes.ts`), and what is done over several turns (`steps.ts`, `block-turns.ts`).
 */
export type { ArenaBlock, BlockFields } from '@kvtier/tiers';
export { type Chain, type PackedHashes, tagOf } from './chain-words.ts';
export { Counters } from './counters.ts';
export { type Failpoint, type FailpointStep, failpointFromEnv } from './failpoints.ts';
export type { HeldTable } from './held-sketch.ts';
export { Holdings } from './holdings.ts';
export { defaultLimits, type StoreLimits } from './limits.ts';
export type { LoadEvents, LoadReason } from './load.ts';
export type { OpenOptions, StoreOptions, TierPlan } from './parts.ts';
export type { ArenaTop, ReadHeader } from './ports.ts';
export type { Reservation, ReserveStatus } from './session-writes.ts';
export type { StoreStats, TierReport } from './stats.ts';
export { type Steps, stepping } from './steps.ts';
export { type LookupResult, Store, type TierSpan } from './store.ts';
export type { Quota, Quotas } from './tenants.ts';
export { type Ticket, ticketBytes, ticketOf } from './tickets.ts';
export type { WritePolicy } from './write-down.ts';
