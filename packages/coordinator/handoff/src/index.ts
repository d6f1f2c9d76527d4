/**
 * Prefill and decode apart: whether a request is split (`decision.ts`, by `times.ts` and `cost.ts`), its two legs (`hand-off.ts`; who gives
 * the first token: `early-token.ts`), and who is let in (`in-time.ts`); prefixes that are copied ahead (`copies.ts`).
 */
export type { Asked } from './asked.ts';
export { Copies, type CopiesOptions } from './copies.ts';
export type { Decision, Expected, HandOffReason, Split } from './decision.ts';
export type { HandOffEngines, Shortfall, Took } from './hand-off.ts';
export { type HandedOff, type HandOffLimits, HandOffs, type HandOffsOptions, handOffDefaults } from './hand-offs.ts';
export { InTime } from './in-time.ts';
export type { Question, Side, SplitMode } from './question.ts';
