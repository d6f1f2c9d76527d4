/** Eviction policies: pure, replayable, chosen per tier by name. */
import { CostAwarePolicy } from './cost-aware.ts';
import { FifoPolicy } from './fifo.ts';
import { LfuPolicy } from './lfu.ts';
import { LruPolicy } from './lru.ts';
import type { BlockPolicyName, EvictionPolicy } from './policy.ts';
import { S3FifoPolicy } from './s3-fifo.ts';

export { type AdmissionName, type AdmissionPolicy, admissionNames, createAdmission } from './admission.ts';
export { LruPolicy } from './lru.ts';
export {
  type BlockPolicyName,
  blockPolicyNames,
  type EntryIndex,
  type EvictionPolicy,
  type InsertHint,
  type PolicyName,
  policyNames,
} from './policy.ts';

const policies: Record<BlockPolicyName, () => EvictionPolicy> = {
  lru: () => new LruPolicy(),
  lfu: () => new LfuPolicy(),
  fifo: () => new FifoPolicy(),
  's3-fifo': () => new S3FifoPolicy(),
  'cost-aware': () => new CostAwarePolicy(),
};

export function createPolicy(name: BlockPolicyName): EvictionPolicy {
  return policies[name]();
}
