/** Prefill and decode apart: whether a request is split, and its two legs; prefixes that are copied ahead. */
export type { Asked } from './asked.ts';
export { Copies, type CopiesOptions } from './copies.ts';
export {
  type Decision,
  decide,
  type Expected,
  type HandOffReason,
  handOffReasons,
  lineOf,
  type Split,
} from './decision.ts';
export { type HandOffEngines, type Shortfall, shortfalls, type Took } from './hand-off.ts';
export {
  type HandedOff,
  type HandOffLimits,
  HandOffs,
  type HandOffsOptions,
  handOffDefaults,
} from './hand-offs.ts';
export { InTime } from './in-time.ts';
export type { Question, Side, SplitMode } from './question.ts';
