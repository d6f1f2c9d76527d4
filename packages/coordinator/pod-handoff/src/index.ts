/** Prefill and decode apart, for pods with OpenAI's API: the decision, and the prefill leg. */
export type { Decision, PodWork, SplitFigures, SplitLimits } from './decision.ts';
export { endpointOf, ipEndpointOf } from './endpoint.ts';
export type { HandOffReason } from './metrics.ts';
export {
  NotPrefilled,
  type Planned,
  type PodCalls,
  PodHandOff,
  type PodHandOffOptions,
  type Prefilled,
  type PrefillRequest,
  type Routed,
} from './pod-handoff.ts';
export { isPrefillOnly } from './pods.ts';
