/**
 * SIGSTOP, in effect. The kernel stops a process through one of its threads, which on a busy machine has to get a CPU first; until then
 * the others go on and answer.
 */
import { readdirSync, readFileSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';

const limitMs = 30_000;

/** Resolves when no thread of it runs any more. @throws Error: it did not stop, or it has ended */
export async function stopProcess(pid: number): Promise<void> {
  process.kill(pid, 'SIGSTOP');
  const endMs = performance.now() + limitMs;
  while (!isStopped(pid)) {
    if (performance.now() > endMs) throw new Error(`process ${pid} did not stop within ${limitMs / 1000} s`);
    await sleep(1);
  }
}

function isStopped(pid: number): boolean {
  return readdirSync(`/proc/${pid}/task`).every((thread) => {
    const stat = readFileSync(`/proc/${pid}/task/${thread}/stat`, 'latin1');
    return /^[TtZX]/.test(stat.slice(stat.lastIndexOf(')') + 2));
  });
}
