/** Eviction policies: pure, replayable, chosen per tier by name. */
import { LruPolicy } from './lru.ts';
import type { EvictionPolicy, PolicyName } from './policy.ts';

export { LruPolicy } from './lru.ts';
export type { EntryIndex, EvictionPolicy, InsertHint, PolicyName } from './policy.ts';

const policies: Record<PolicyName, () => EvictionPolicy> = {
  lru: () => new LruPolicy(),
};

export function createPolicy(name: PolicyName): EvictionPolicy {
  return policies[name]();
}
