/** Errors of two kinds, and waits for what is outside of this process. */
export { codes, type KvErrorCode } from './codes.ts';
export { InvariantError, invariant, KvError, type KvErrorOptions } from './kv-error.ts';
export { Outside, within } from './outside.ts';
