/**
 * The engine's end of the session with a cache node: matches, loads and stores (`node-connector.ts`), whose turn it is to be stored
 * (`store-turns.ts`), over one connection (`session-link.ts`) that is felt to live (`silence.ts`, `beats.ts`).
 */
export type { ConnectorCounters } from './counters.ts';
export { type ConnectorOptions, createConnector, type NodeConnector } from './node-connector.ts';
export type { ConnectorLogger } from './session-client.ts';
export type { Timers } from './timers.ts';
