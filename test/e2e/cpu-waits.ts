/**
 * How long a cluster's processes stood in the queue for a CPU, as the kernel counts it: what a busy machine adds to a time that a test
 * bounds. Only the event loop that waited longest counts: loops that wait for a CPU at the same time keep a request waiting once. On a quiet
 * machine that is next to nothing, and the bound is the bound.
 */
import { readdirSync, readFileSync } from 'node:fs';
import { getPriority } from 'node:os';

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
function waitedMs(pid: number, thread = pid): number | undefined {
  try {
    return Number(readFileSync(`/proc/${pid}/task/${thread}/schedstat`, 'latin1').split(' ')[1]) / 1e6;
  } catch {
    return undefined;
  }
}

/** What each thread of some processes has waited for a CPU up to now. */
export type ThreadWaits = ReadonlyMap<number, ReadonlyMap<number, number>>;

export function threadWaits(pids: readonly number[]): ThreadWaits {
  return new Map(
    pids.map((pid) => {
      const threads = new Map<number, number>();
      for (const name of readdirSync(`/proc/${pid}/task`)) {
        const ms = waitedMs(pid, Number(name));
        if (ms !== undefined) threads.set(Number(name), ms);
      }
      return [pid, threads];
    }),
  );
}

/**
 * For how long something that passes through the event loops of these processes, one after another, may have been kept waiting for a CPU
 * between two moments: by the loops themselves, and by the one of their helpers (V8's collector works in threads, and the event loop
 * waits for them) that waited longest. A thread that stands back holds up nobody.
 */
export function waitedBetween(before: ThreadWaits, after: ThreadWaits): number {
  let sum = 0;
  for (const [pid, threads] of after) {
    let longest = 0;
    for (const [thread, ms] of threads) {
      const waited = ms - (before.get(pid)?.get(thread) ?? ms);
      if (thread === pid) sum += waited;
      else if (waited > longest && isEqual(thread, pid)) longest = waited;
    }
    sum += longest;
  }
  return sum;
}

/** In the queue for a CPU. */
function isEqual(thread: number, pid: number): boolean {
  try {
    return getPriority(thread) <= getPriority(pid);
  } catch {
    return false; // it has ended
  }
}
