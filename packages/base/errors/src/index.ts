/** Errors of two kinds, the name that was meant, and waits for what is outside of this process. */
export { codes, type KvErrorCode } from './codes.ts';
export { configExitCode, exitCodeOf } from './exit-code.ts';
export { InvariantError, invariant, KvError, type KvErrorOptions } from './kv-error.ts';
export { nearest } from './nearest.ts';
export { Outside, within } from './outside.ts';
