/** Who is alive in the cluster, what it is, and how loaded. */
export { createDiscovery } from './create-discovery.ts';
export type { Discovery, DiscoveryListener } from './discovery.ts';
export { StaticDiscovery } from './static-discovery.ts';
export type { Sent, Worker, WorkerFacts, WorkerLoad, WorkerState } from './worker.ts';
