/** Preloaded into a process: asked by its parent, it collects all that is not in use and tells how much is left. */
const { setFlagsFromString } = require('node:v8');
const { runInNewContext } = require('node:vm');
const { isMainThread } = require('node:worker_threads');

if (isMainThread && process.send !== undefined) {
  setFlagsFromString('--expose-gc');
  const collect = runInNewContext('gc');
  process.on('message', (asked) => {
    if (asked !== 'live memory') return;
    collect();
    const { heapUsed, external } = process.memoryUsage();
    process.send({ liveBytes: heapUsed + external });
  });
  process.channel.unref();
}
