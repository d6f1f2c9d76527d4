/** Prefill and decode apart, for pods with OpenAI's API: the decision, and the prefill leg. */
export { type Decision, decideSplit, type PodWork, type SplitFigures, type SplitLimits } from './decision.ts';
export { endpointOf, ipEndpointOf } from './endpoint.ts';
export { type HandOffReason, PodHandOffMetrics } from './metrics.ts';
export {
  NotPrefilled,
  type Planned,
  type PodCalls,
  PodHandOff,
  type PodHandOffOptions,
  type Prefilled,
  type PrefillRequest,
  type Routed,
  uncachedOf,
} from './pod-handoff.ts';
export { hasPrefill, isPrefillOnly } from './pods.ts';
