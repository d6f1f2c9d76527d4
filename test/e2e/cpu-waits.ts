/**
 * How long a cluster's processes stood in the queue for a CPU, as the kernel counts it: what a busy machine adds to a time that a test
 * bounds. A request passes one process of each stage, one after another: of a stage the event loop that waited longest counts, and stages
 * add up. On a quiet machine that is next to nothing, and the bound is the bound.
 */
import { readdirSync, readFileSync } from 'node:fs';
import { getPriority } from 'node:os';

/** Process ids of what a request passes through one of; undefined: it does not run. */
export type Stage = readonly (number | undefined)[];

export class CpuWaits {
  readonly #stages: () => readonly Stage[];
  readonly #before: readonly ReadonlyMap<number, number>[];

  /** `stages`: of those that run now; asked again at the end, for some are started meanwhile. The test's own process is one, too. */
  constructor(stages: () => readonly Stage[]) {
    this.#stages = stages;
    this.#before = this.#read();
  }

  /** Since it was made. */
  get ms(): number {
    const before = new Map(this.#before.flatMap((waits) => [...waits]));
    return this.#read()
      .map((waits) => Math.max(0, ...[...waits].map(([pid, ms]) => ms - (before.get(pid) ?? 0))))
      .reduce((sum, ms) => sum + ms, 0);
  }

  /** Of the threads that turn the event loops. */
  #read(): Map<number, number>[] {
    return [...this.#stages(), [process.pid]].map((stage) => {
      const waits = new Map<number, number>();
      for (const pid of stage) {
        const ms = pid === undefined ? undefined : waitedMs(pid);
        if (ms !== undefined) waits.set(pid!, ms);
      }
      return waits;
    });
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
