/**
 * What `kv_transfer_params` stand for: blocks that lie at the pod which computed the prompt and are lent to one reader, once, or blocks of
 * a store, which are found by what they hold.
 *
 * A pod that lends gives its blocks to the next prompt as soon as they were read, or when its patience ends, and tells nobody. Whoever
 * reads them then gets another prompt's, and a wrong answer with status 200.
 */

/** By which our own connector marks its promise (packages/connector/python): its blocks have names, and one that is gone is a miss. */
const ownKey = 'kvtier';

/** Whether they may go to one pod only. What is not known to be harmless is lent. */
export function isLoan(params: unknown): boolean {
  if (typeof params !== 'object' || params === null || Array.isArray(params)) return false;
  const given = params as Readonly<Record<string, unknown>>;
  if (holdsSomething(given.remote_block_ids)) return true;
  if (typeof given[ownKey] === 'object' && given[ownKey] !== null) return false;
  if (given.do_remote_prefill === true) return true;
  // Asked of the pod that lends: it reads nothing.
  if (given.do_remote_decode === true) return false;
  return Object.entries(given).some(
    ([name, value]) => (name.startsWith('remote_') || name === 'transfer_id') && holdsSomething(value),
  );
}

/** NIXL has one list for each group of layers: all of them may be empty. */
function holdsSomething(value: unknown): boolean {
  if (Array.isArray(value)) return value.some((group) => !Array.isArray(group) || group.length > 0);
  return value !== undefined && value !== null && value !== false && value !== '';
}
