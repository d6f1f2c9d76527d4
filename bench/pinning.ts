/**
 * The threads that compute, each on a processor of its own. Where they may wander, they now and then share one for some milliseconds,
 * above all just after they were stopped: two equal systems then differ by 4 % from request to request, pinned by 1.5 %.
 */
import { execFileSync } from 'node:child_process';
import { readdirSync, readFileSync } from 'node:fs';
import { KvError } from '@kvtier/errors';

/** As packages/engine/executor/cc names them. */
const computing = ['kvtier-step', 'kvtier-compute'];

/** Pins the computing threads of these processes, the n-th of each process to the n-th processor that we may use. */
export function pinComputing(pids: readonly number[]): void {
  const processors = allowedProcessors();
  let pinned = 0;
  for (const pid of pids) {
    const threads = readdirSync(`/proc/${pid}/task`).filter((thread) =>
      computing.includes(readFileSync(`/proc/${pid}/task/${thread}/comm`, 'utf8').trim()),
    );
    for (const [i, thread] of threads.entries()) {
      execFileSync('taskset', ['-cp', String(processors[i % processors.length]), thread]);
      pinned++;
    }
  }
  if (pinned === 0)
    throw new KvError('IO', `no thread of processes ${pids.join(', ')} is named ${computing.join(' or ')}`);
}

/** Before a command: it and what it starts run on this processor alone. */
export const onProcessor = (processor: number): string[] => ['taskset', '-c', String(processor)];

/** "0-3,8" of /proc/self/status. */
export function allowedProcessors(): number[] {
  const [, list] = /^Cpus_allowed_list:\s*(\S+)$/m.exec(readFileSync('/proc/self/status', 'utf8'))!;
  return list!.split(',').flatMap((range) => {
    const [first, last = first] = range.split('-').map(Number) as [number, number?];
    return Array.from({ length: last! - first + 1 }, (_, i) => first + i);
  });
}
