/** Of files that are renewed under a process (packages/base/config/src/renewed-files.ts): that they are in use, or why not. */
import type { Logger } from './log.ts';

export const tellRenewed =
  (logger: Logger, what: string): ((why: string | undefined) => void) =>
  (why) => {
    if (why === undefined) logger.info(`${what} in use`);
    else logger.warn(why);
  };
