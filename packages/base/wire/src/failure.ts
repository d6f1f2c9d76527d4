/** A KvError on the wire and back: the code survives, so that the far side can react to it. */
import { codes, KvError, type KvErrorCode } from '@kvtier/errors';
import type { KvFailure } from './generated/kvtier/v1/errors.ts';

/** Any thrown value as what travels. */
export function toFailure(thrown: unknown): KvFailure {
  const error = KvError.from(thrown);
  return { code: error.code, message: error.message, retry: error.retry, tier: error.tier ?? '' };
}

/** A failure that a peer sent. A code of a newer version than ours becomes IO, its name kept in the message. */
export function fromFailure(failure: KvFailure): KvError {
  const known = Object.hasOwn(codes, failure.code);
  return new KvError(
    known ? (failure.code as KvErrorCode) : 'IO',
    known ? failure.message : `${failure.code}: ${failure.message}`,
    { retry: failure.retry, ...(failure.tier === '' ? {} : { tier: failure.tier }) },
  );
}
