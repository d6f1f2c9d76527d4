/**
 * Which worker a request goes to: policies, pure. What they look at: `look.ts`, `block-table.ts`, `under-way.ts`, `in-use.ts`; late
 * bindings are answered in order (`response-order.ts`); whether waiting for a holder pays: `rent-or-buy.ts`.
 */
import { BalancedTree } from './policies/balanced-tree.ts';
import { BoundedHash } from './policies/bounded-hash.ts';
import { HashTrie } from './policies/hash-trie.ts';
import { LeastLoaded } from './policies/least-loaded.ts';
import { LoadBand } from './policies/load-band.ts';
import { OverlapCost } from './policies/overlap-cost.ts';
import { PowerOfTwo } from './policies/power-of-two.ts';
import { Predicted } from './policies/predicted.ts';
import { RoundRobin } from './policies/round-robin.ts';
import { Scored } from './policies/scored.ts';
import { SimHash } from './policies/sim-hash.ts';
import { Sticky } from './policies/sticky.ts';
import type { Policy } from './policy.ts';

export { AnswerLengths } from './answer-lengths.ts';
export { Budget, type BudgetOptions } from './copies/budget.ts';
export { type Copy, type CopyEnd, CopyPlanner, type CopyPlannerOptions } from './copies/copy-planner.ts';
export {
  type Assignment,
  LateBinding,
  type LateBindingOptions,
  lateBindingDefaults,
} from './late-binding.ts';
export { opensAtS, type StatesFor } from './look.ts';
export {
  bringSecondsOf,
  computeAheadS,
  computedTokensOf,
  costOf,
  roomForS,
  roomS,
  workS,
} from './policies/predicted.ts';
export type { Policy, Random, RoutedRequest, WorkerState } from './policy.ts';

/** By the names that configuration gives them. */
export const policies = {
  predicted: (): Policy => new Predicted(),
  'round-robin': (): Policy => new RoundRobin(),
  'least-loaded': (): Policy => new LeastLoaded(),
  'power-of-two': (): Policy => new PowerOfTwo(),
  'bounded-hash': (): Policy => new BoundedHash(),
  'sim-hash': (): Policy => new SimHash(),
  'hash-trie': (): Policy => new HashTrie(),
  'balanced-tree': (): Policy => new BalancedTree(),
  'load-band': (): Policy => new LoadBand(),
  scored: (): Policy => new Scored(),
  'overlap-cost': (): Policy => new OverlapCost(),
  sticky: (): Policy => new Sticky(),
} as const;

export type PolicyName = keyof typeof policies;
