/**
 * Processors that are as fast as they are whatever else the machine does. Two that share a core's units, caches or clock are faster while
 * the other one has nothing to do: of two hosts on one machine, the one whose neighbour rests then computes faster than hosts of their own
 * would. So each processor gets a process that computes when nobody else wants it (SCHED_IDLE): it takes nobody's turn, and leaves nobody a
 * machine for itself.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { allowedProcessors, onProcessor } from './pinning.ts';

const endless = 'let x = 1; for (;;) x = (Math.imul(x, 1664525) + 1013904223) | 0;';

/** Until the returned function is called, or this process ends. */
export function evenCores(): () => void {
  const all: ChildProcess[] = [];
  for (const processor of allowedProcessors()) {
    const alone = [...onProcessor(processor), 'chrt', '--idle', '0', process.execPath, '-e', endless];
    all.push(spawn('setpriv', ['--pdeathsig', 'KILL', ...alone], { stdio: 'ignore' }));
  }
  return () => {
    for (const child of all) child.kill('SIGKILL');
  };
}
