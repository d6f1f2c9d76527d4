/** Eviction policies: pure, replayable, chosen per tier by name. */
import { FifoPolicy } from './fifo.ts';
import { LfuPolicy } from './lfu.ts';
import { LruPolicy } from './lru.ts';
import type { EvictionPolicy, PolicyName } from './policy.ts';
import { S3FifoPolicy } from './s3-fifo.ts';

export { type AdmissionName, type AdmissionPolicy, admissionNames, createAdmission } from './admission.ts';
export { FifoPolicy } from './fifo.ts';
export { LfuPolicy } from './lfu.ts';
export { LruPolicy } from './lru.ts';
export { type EntryIndex, type EvictionPolicy, type InsertHint, type PolicyName, policyNames } from './policy.ts';
export { S3FifoPolicy } from './s3-fifo.ts';

const policies: Record<PolicyName, () => EvictionPolicy> = {
  lru: () => new LruPolicy(),
  lfu: () => new LfuPolicy(),
  fifo: () => new FifoPolicy(),
  's3-fifo': () => new S3FifoPolicy(),
};

export function createPolicy(name: PolicyName): EvictionPolicy {
  return policies[name]();
}
