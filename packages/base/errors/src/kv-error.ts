/**
 * Two kinds of error. A broken invariant is an assertion that stays on in production (`invariant`). What the world does
 * is a `KvError` with a stable code and one line that says what, where and how to mend it. A miss is not an error.
 */
import { codes, type KvErrorCode } from './codes.ts';

export interface KvErrorOptions {
  /** The same call may succeed later. */
  readonly retry?: boolean;
  /** What was written is wrong, and not what was found: nothing but another text mends it. */
  readonly isFinal?: boolean;
  /** The tier that failed. */
  readonly tier?: string;
  readonly cause?: unknown;
}

export class KvError extends Error {
  override readonly name = 'KvError';
  readonly code: KvErrorCode;
  readonly retry: boolean;
  readonly isFinal: boolean;
  readonly tier: string | undefined;

  constructor(code: KvErrorCode, message: string, options: KvErrorOptions = {}) {
    super(message, options.cause === undefined ? undefined : { cause: options.cause });
    this.code = code;
    this.retry = options.retry ?? false;
    this.isFinal = options.isFinal ?? false;
    this.tier = options.tier;
  }

  /** Any thrown value as a KvError; a foreign error becomes `fallback`, its message kept. */
  static from(thrown: unknown, fallback: KvErrorCode = 'IO'): KvError {
    if (thrown instanceof KvError) return thrown;
    const message = thrown instanceof Error ? thrown.message : String(thrown);
    // Native code throws plain errors whose message starts with a code: "LOCKED: ...".
    const match = /^([A-Z_]+): (.*)$/s.exec(message);
    if (match && match[1]! in codes) return new KvError(match[1] as KvErrorCode, match[2]!, { cause: thrown });
    return new KvError(fallback, message, { cause: thrown });
  }
}

/** Thrown by `invariant`: a defect in this program, never the world's doing. */
export class InvariantError extends Error {
  override readonly name = 'InvariantError';
}

/** Assert what must hold. Stays on in production; `message` is only built when it fails. */
export function invariant(condition: unknown, message: string | (() => string)): asserts condition {
  if (!condition) throw new InvariantError(typeof message === 'string' ? message : message());
}
