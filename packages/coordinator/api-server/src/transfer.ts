/**
 * What `kv_transfer_params` stand for: blocks that lie at the pod which computed the prompt and are lent to one reader, once, or blocks of
 * a store, which are found by what they hold.
 *
 * A pod that lends gives its blocks to the next prompt as soon as they were read, or when its patience ends, and tells nobody. Whoever
 * reads them then gets another prompt's, and a wrong answer with status 200.
 */

import { isEmpty } from './unsplit.ts';

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

/** Members by themselves; the second one is of encoders apart. In `vllm_xargs` vLLM takes them, too. */
const members = ['kv_transfer_params', 'ec_transfer_params', 'kv_hints', 'kv_hint'] as const;
const mostNamed = 64;

/**
 * By which member a body tells a pod where blocks come from, where they go, or how long they stay; undefined: by none. Pods believe it: it
 * names hosts to fetch from, blocks to read whosever they are, and blocks to hold. For its own request a client may do without a store.
 */
export function transferIn(body: Readonly<Record<string, unknown>>): string | undefined {
  const named = members.find((name) => !saysNothing(body[name]) && !(name === members[0] && isOwnChoice(body[name])));
  if (named !== undefined) return named;
  const { vllm_xargs: others } = body;
  if (typeof others === 'object' && others !== null) {
    const name = members.find((name) => !saysNothing((others as Readonly<Record<string, unknown>>)[name]));
    if (name !== undefined) return `vllm_xargs.${name}`;
  }
  // SGLang's.
  return Object.keys(body)
    .find((name) => name.startsWith('bootstrap_') && !saysNothing(body[name]))
    ?.slice(0, mostNamed);
}

/** Empty, or of members that are: so do programs write out what they leave as it is. */
const saysNothing = (value: unknown): boolean =>
  isEmpty(value) || (typeof value === 'object' && Object.values(value as object).every(isUnset));
const isUnset = (value: unknown): boolean => value === null || value === false || value === '';

export const whyNoTransfer = (member: string): string =>
  `${member}: tells pods where blocks of a prompt come from, go to or stay, which clients may not. Leave it out`;

/** `{"kvtier": {"load": BOOLEAN, "store": BOOLEAN}}`, and nothing else. null is what it is without. */
function isOwnChoice(params: unknown): boolean {
  const isOnly = (value: unknown, names: readonly string[]): value is Readonly<Record<string, unknown>> =>
    typeof value === 'object' && value !== null && Object.keys(value).every((name) => names.includes(name));
  if (!isOnly(params, [ownKey])) return false;
  const choice = params[ownKey];
  const isSaid = (value: unknown): boolean => typeof value === 'boolean' || value === null;
  return isOnly(choice, ['load', 'store']) && Object.values(choice).every(isSaid);
}

/** NIXL has one list for each group of layers: all of them may be empty. */
function holdsSomething(value: unknown): boolean {
  if (Array.isArray(value)) return value.some((group) => !Array.isArray(group) || group.length > 0);
  return value !== undefined && value !== null && value !== false && value !== '';
}
