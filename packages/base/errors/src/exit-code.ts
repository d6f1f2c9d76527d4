/** How a process ends that cannot work: docs/errors.md, "Exit codes". */
import type { KvError } from './kv-error.ts';

/** EX_CONFIG of BSD's list: whoever starts it again need not, before somebody has mended what it read. */
export const configExitCode = 78;

export const exitCodeOf = (problems: readonly Pick<KvError, 'isFinal'>[]): number =>
  problems.some(({ isFinal }) => isFinal) ? configExitCode : 1;
