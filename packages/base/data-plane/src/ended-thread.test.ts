/** A thread that is ended while native code refuses its arguments costs the thread, and not the process. */
import { execFile } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { expect, it } from 'vitest';

const addon = fileURLToPath(new URL('../../../../build/data-plane/kvtier_data_plane.node', import.meta.url));
const threads = 20;
const program = `
const { Worker, isMainThread, parentPort } = require('node:worker_threads');
const native = require(${JSON.stringify(addon)});
if (isMainThread) {
  (async () => {
    for (let i = 0; i < ${threads}; i++) {
      const worker = new Worker(process.argv[1], { eval: true });
      await new Promise((resolve) => worker.once('message', resolve));
      await worker.terminate();
    }
    process.stdout.write('alive');
  })();
} else {
  let refused = 0;
  for (;;) {
    try {
      native.xxh3_64({});
    } catch {
      if (refused++ === 0) parentPort.postMessage('refused');
    }
  }
}`;

it('the process outlives its threads', async () => {
  const { stdout } = await promisify(execFile)(process.execPath, ['-e', program, program], { timeout: 20_000 });
  expect(stdout).toBe('alive');
});
