/**
 * How long a cluster's processes stood in the queue for a CPU, as the kernel counts it: what a busy machine adds to a time that a test
 * bounds. A request passes one process of each kind, and the test's own; so the most of each kind, of its thread that waited longest, are
 * added up. On a quiet machine that is next to nothing, and the bound is the bound.
 */
import { readdirSync, readFileSync } from 'node:fs';

export interface Waiting {
  readonly kind: string;
  readonly pid: number | undefined;
}

export class CpuWaits {
  readonly #members: () => readonly Waiting[];
  #before: ReadonlyMap<string, number>;

  /** `members`: those that run now; asked again at the end, for some are started meanwhile. */
  constructor(members: () => readonly Waiting[]) {
    this.#members = members;
    this.#before = this.#read();
  }

  /** Since it was made. */
  get ms(): number {
    const most = new Map<string, number>();
    for (const [thread, ms] of this.#read()) {
      const kind = thread.split(' ')[0]!;
      most.set(kind, Math.max(most.get(kind) ?? 0, ms - (this.#before.get(thread) ?? 0)));
    }
    return [...most.values()].reduce((sum, ms) => sum + ms, 0);
  }

  /** By kind and thread. */
  #read(): Map<string, number> {
    const waits = new Map<string, number>();
    for (const { kind, pid } of [...this.#members(), { kind: 'test', pid: process.pid }]) {
      if (pid === undefined) continue;
      for (const [thread, ms] of threadWaits(pid)) waits.set(`${kind} ${thread}`, ms);
    }
    return waits;
  }
}

/** Nothing of a process that has ended. */
function threadWaits(pid: number): [thread: string, ms: number][] {
  const waits: [string, number][] = [];
  try {
    for (const thread of readdirSync(`/proc/${pid}/task`))
      waits.push([thread, Number(readFileSync(`/proc/${pid}/task/${thread}/schedstat`, 'latin1').split(' ')[1]) / 1e6]);
  } catch {
    // It ends.
  }
  return waits;
}
