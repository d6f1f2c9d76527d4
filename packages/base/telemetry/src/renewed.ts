/**
 * Of files that are renewed under a process (packages/base/config/src/renewed-files.ts): that they are in use, or why not; how often not,
 * and of how many it is so now, of the whole process.
 */
interface Lines {
  info(line: string): void;
  warn(line: string): void;
}

/** One file, or those that make one thing together. */
interface Files {
  readonly isRefused: boolean;
}

let refused = 0;
const told = new Set<Files>();

export const tellRenewed =
  (logger: Lines, what: string): ((why: string | undefined, of?: Files) => void) =>
  (why, of) => {
    letGo();
    if (of !== undefined) told[why === undefined ? 'delete' : 'add'](of);
    if (why === undefined) {
      logger.info(`${what} in use`);
      return;
    }
    refused++;
    logger.warn(why);
  };

/** New files that could not be used, since the process began. */
export const refusedRenewals = (): number => refused;

/** Of which what lies there now cannot be used. */
export const refusedFiles = (): number => {
  letGo();
  return told.size;
};

/** Who stops looking at refused files says nothing: they are not refused any more. */
function letGo(): void {
  for (const files of told) if (!files.isRefused) told.delete(files);
}
