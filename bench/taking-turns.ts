/**
 * Systems that do the same at the same time, and never at the same moment: one runs for a slice, then the next, until all have
 * answered. Only the slices of a system count for it. All so meet the same weather of a machine whose speed changes from one
 * second to the next, which runs one after the other do not: their ratio then scatters by a tenth and more, this one by a hundredth.
 * Idea: randomised block designs, with blocks as short as a system can be stopped in.
 *
 * What it does to them: their clocks go on while they are stopped, so what waits for a time waits less of its own time; and a slice
 * begins with the caches as the other left them. That happens to all.
 */

/** Long against a stop and a cold cache (some 0.2 ms), short against an answer. */
const sliceMs = 25;

export interface Runner {
  /** Its processes, all of them. */
  readonly pids: readonly number[];
  /** Asks, and says after how many ms of the wall clock the answer came. */
  ask(): Promise<number>;
}

/** Ms that each ran until its answer. All run when this returns. What `ask` throws, it throws. */
export async function takeTurns(runners: readonly Runner[]): Promise<number[]> {
  const turns = runners.map((runner) => new Turns(runner));
  try {
    for (const { pids } of runners) send(pids, 'SIGSTOP');
    while (turns.some(({ isDone }) => !isDone)) for (const each of turns) if (!each.isDone) await each.next();
    return turns.map(({ ranMs }) => ranMs);
  } finally {
    for (const { pids } of runners) send(pids, 'SIGCONT');
  }
}

class Turns {
  readonly #runner: Runner;
  readonly #slices: { readonly startMs: number; readonly endMs: number }[] = [];
  #asked: Promise<void> | undefined;
  #answerMs = Number.POSITIVE_INFINITY;

  constructor(runner: Runner) {
    this.#runner = runner;
  }

  get isDone(): boolean {
    return this.#answerMs < Number.POSITIVE_INFINITY;
  }

  /** What of its slices lay before the answer: its last words may come a slice later. */
  get ranMs(): number {
    return this.#slices.reduce(
      (all, { startMs, endMs }) => all + Math.max(0, Math.min(endMs, this.#answerMs) - startMs),
      0,
    );
  }

  async next(): Promise<void> {
    const startMs = performance.now();
    send(this.#runner.pids, 'SIGCONT');
    this.#asked ??= this.#runner.ask().then((ms) => {
      this.#answerMs = startMs + ms;
    });
    this.#asked.catch(() => {}); // thrown in its own next slice, and not in the midst of another's
    let timer: NodeJS.Timeout | undefined;
    const over = new Promise<void>((resolve) => {
      timer = setTimeout(resolve, sliceMs);
    });
    await Promise.race([this.#asked, over]);
    clearTimeout(timer);
    send(this.#runner.pids, 'SIGSTOP');
    this.#slices.push({ startMs, endMs: performance.now() });
  }
}

function send(pids: readonly number[], signal: 'SIGSTOP' | 'SIGCONT'): void {
  for (const pid of pids) process.kill(pid, signal);
}
