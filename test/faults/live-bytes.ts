/**
 * What lives in another process: on its JavaScript heap and in buffers, garbage collected first. What it has of the machine's memory
 * depends on when the collector found time, and so on what else the machine does.
 */
import type { ChildProcess } from 'node:child_process';

const question = 'live bytes?';
const answers = `
  import { setFlagsFromString } from 'node:v8';
  import { runInNewContext } from 'node:vm';
  import { isMainThread } from 'node:worker_threads';
  setFlagsFromString('--expose-gc');
  const collect = runInNewContext('gc');
  if (isMainThread) process.on('message', (message) => {
    if (message !== ${JSON.stringify(question)}) return;
    collect();
    const { heapUsed, external } = process.memoryUsage();
    process.send({ liveBytes: heapUsed + external });
  });`;

/** In the environment of the process that is to be asked. */
export const answersLiveBytes = {
  NODE_OPTIONS: `--import=data:text/javascript,${encodeURIComponent(answers)}`,
} as const;

export function liveBytes(child: ChildProcess): Promise<number> {
  return new Promise((resolve, reject) => {
    const onExit = (): void => reject(new Error('the process has ended'));
    const onMessage = (message: { readonly liveBytes?: number }): void => {
      if (message.liveBytes === undefined) return;
      child.off('message', onMessage).off('exit', onExit);
      resolve(message.liveBytes);
    };
    child.on('message', onMessage).on('exit', onExit);
    child.send(question);
  });
}
