/**
 * How long a cluster's processes stood in the queue for a CPU, as the kernel counts it: what a busy machine adds to a time that a test
 * bounds. Only the event loop that waited longest counts: loops that wait for a CPU at the same time keep a request waiting once. On a quiet
 * machine that is next to nothing, and the bound is the bound.
 */
import { readFileSync } from 'node:fs';

export class CpuWaits {
  readonly #pids: () => readonly (number | undefined)[];
  readonly #before: ReadonlyMap<number, number>;

  /** `pids`: of those that run now; asked again at the end, for some are started meanwhile. */
  constructor(pids: () => readonly (number | undefined)[]) {
    this.#pids = pids;
    this.#before = this.#read();
  }

  /** Since it was made. */
  get ms(): number {
    return Math.max(...[...this.#read()].map(([pid, ms]) => ms - (this.#before.get(pid) ?? 0)));
  }

  /** Of the thread that turns the event loop, the test's own process included. */
  #read(): Map<number, number> {
    const waits = new Map<number, number>();
    for (const pid of [...this.#pids(), process.pid]) {
      const ms = pid === undefined ? undefined : waitedMs(pid);
      if (ms !== undefined) waits.set(pid!, ms);
    }
    return waits;
  }
}

/** Undefined: it has ended. */
function waitedMs(pid: number): number | undefined {
  try {
    return Number(readFileSync(`/proc/${pid}/schedstat`, 'latin1').split(' ')[1]) / 1e6;
  } catch {
    return undefined;
  }
}
