/**
 * A file system call that never returns, in a process that knows nothing of it: open(2) of a FIFO that nobody writes to occupies a
 * thread of libuv's for good, as a dead NFS mount or a stuck disk does. SIGUSR2 makes such a process throw where nobody catches.
 */
import { execFileSync } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

/** NODE_OPTIONS for it. Applies to the processes whose main file's path contains `program`. `folder`: for what it needs. */
export function hungCall(folder: string, program: string): string {
  const fifo = join(folder, 'hangs');
  const preload = join(folder, 'hung-call.mjs');
  execFileSync('mkfifo', [fifo]);
  writeFileSync(
    preload,
    `import { open } from 'node:fs';
     import { isMainThread } from 'node:worker_threads';
     if (isMainThread && process.argv[1]?.includes(${JSON.stringify(program)})) {
       open(${JSON.stringify(fifo)}, 'r', () => {});
       process.on('SIGUSR2', () => { throw new Error('injected'); });
     }`,
  );
  return `--import=${pathToFileURL(preload).href}`;
}
