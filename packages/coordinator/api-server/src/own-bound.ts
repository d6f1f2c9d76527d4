/**
 * What a client is told where a bound of this coordinator itself is met (429): more workers would change nothing; a higher bound (`limits` of
 * the configuration) or another coordinator would. That all workers are saturated says dispatch, in other words.
 */
import { KvError } from '@kvtier/errors';

export const ownBound = (what: string): KvError =>
  new KvError('BUSY', `this coordinator's own bound: ${what}; try again later`, { retry: true });
