/** Who is alive in the cluster, what it is, and how loaded. */
export { AnswerTail, type Usage } from './answer-tail.ts';
export { checkDiscovery } from './check-discovery.ts';
export { createDiscovery } from './create-discovery.ts';
export type { Discovery, DiscoveryListener } from './discovery.ts';
export { EngineCalls, type EngineCallsOptions, type OnEvent } from './engine-calls.ts';
export { Fleet, type FleetOptions, tierMedia } from './fleet.ts';
export { fleetMetrics } from './fleet-metrics.ts';
export { LateLook } from './late-look.ts';
export { type Access, type LinkTimes, linkTimes } from './link.ts';
export { expectedLoads, usualLoads } from './load-rates.ts';
export type { FleetCounts } from './member.ts';
export { type Forwarded, leave } from './pod-requests.ts';
export type { Share } from './sent-ledger.ts';
export { StaticDiscovery } from './static-discovery.ts';
export type { Leaning, OtherName, Sent, Worker, WorkerFacts, WorkerLoad, WorkerState } from './worker.ts';
