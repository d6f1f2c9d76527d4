export type { ConnectorCounters } from './counters.ts';
export { type ConnectorOptions, createConnector, type NodeConnector } from './node-connector.ts';
export type { ConnectorLogger } from './session-client.ts';
export { realTimers, type Timers } from './timers.ts';
