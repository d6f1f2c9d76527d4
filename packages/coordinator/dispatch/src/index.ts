/**
 * Which worker gets a request now: registry, KV index and routing policy together. Who waits, and looks again: `waiters.ts`,
 * `queue-looks.ts`.
 */
export type { Choice, Dispatch, DispatchRequest } from './choice.ts';
export { Dispatcher, type DispatcherOptions, type DispatchStats } from './dispatcher.ts';
export { Outdated } from './outdated.ts';
export type { Held, Holdings, Share, Workers } from './ports.ts';
export { Saturated } from './saturated.ts';
export { sessionHeaders, sessionIn, type Targets, targetHeaders, targetsIn } from './wishes.ts';
