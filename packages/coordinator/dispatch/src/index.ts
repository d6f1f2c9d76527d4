/** Which worker gets a request now: registry, KV index and routing policy together. */
export type { Choice, Dispatch, DispatchRequest } from './choice.ts';
