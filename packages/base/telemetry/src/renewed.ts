/**
 * Of files that are renewed under a process (packages/base/config/src/renewed-files.ts): that they are in use, or why not; and how often
 * not, of the whole process.
 */
interface Lines {
  info(line: string): void;
  warn(line: string): void;
}

let refused = 0;

export const tellRenewed =
  (logger: Lines, what: string): ((why: string | undefined) => void) =>
  (why) => {
    if (why === undefined) {
      logger.info(`${what} in use`);
      return;
    }
    refused++;
    logger.warn(why);
  };

/** New files that could not be used, since the process began. */
export const refusedRenewals = (): number => refused;
