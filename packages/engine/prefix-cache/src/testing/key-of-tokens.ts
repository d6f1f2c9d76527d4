/** A hash of the right shape for a run of tokens, without the chain: for the doubles of requests in tests. */
import { createHash } from 'node:crypto';
import { type HashKey, hashKeyOf } from '@kvtier/identity';

export function keyOfTokens(tokens: readonly number[]): HashKey {
  return hashKeyOf(createHash('sha256').update(tokens.join()).digest());
}
