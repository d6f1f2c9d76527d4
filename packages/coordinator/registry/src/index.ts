/**
 * Who is alive in the cluster, what it is, and how loaded. Found by `discovery.ts` (`kubernetes/members.ts`); lines to all of them in
 * turns (`line-turns.ts`); who follows the fleet: `late-look.ts`; calls of one worker together: `shared-call.ts`. Of pods: how fast they
 * compute (`own-rate.ts`, `computed-rate.ts`, `believed-rate.ts`) and step (`step-line.ts`), what fails there (`request-failures.ts`), what proves their life (`pod-asks.ts`,
 * `living-timeout.ts`), how their streams begin (`stream-start.ts`).
 */
export { AnswerTail, type Usage } from './answer-tail.ts';
export { checkDiscovery } from './check-discovery.ts';
export { createDiscovery } from './create-discovery.ts';
export type { Discovery, DiscoveryListener } from './discovery.ts';
export { EngineCalls, type EngineCallsOptions, type OnEvent } from './engine-calls.ts';
export { Fleet, type FleetOptions, tierMedia } from './fleet.ts';
export { fleetMetrics } from './fleet-metrics.ts';
export { LateLook } from './late-look.ts';
export type { Access, LinkTimes } from './link.ts';
export { expectedLoads, usualLoads } from './load-rates.ts';
export type { FleetCounts } from './member.ts';
export { type Forwarded, leave } from './pod-requests.ts';
export type { Share } from './sent-ledger.ts';
export { outcomeOf, StartReader, type StreamStart, type Verdict } from './stream-start.ts';
export type { Leaning, OtherName, Sent, Worker, WorkerFacts, WorkerLoad, WorkerState } from './worker.ts';
