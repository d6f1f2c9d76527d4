/**
 * Writes to one partition, gathered into batches: what a batch costs in scripts is shared by its blocks. Two are under way at a
 * time, one that moves bytes and one that is reserved meanwhile; what comes in between goes together in the next. Invariant: blocks
 * of a batch have one namespace; bounded by what the tier admits.
 */
import type { Namespace } from '@kvtier/identity';

/** Blocks of one batch: a script holds up all other clients of its server. */
const maxBlocks = 32;
const maxRunning = 2;

interface Batch<J> {
  readonly namespace: Namespace;
  readonly jobs: J[];
  readonly ended: Promise<void>;
  readonly end: (run: Promise<void>) => void;
}

export class WriteBatches<J> {
  readonly #run: (namespace: Namespace, jobs: readonly J[]) => Promise<void>;
  readonly #waiting: Batch<J>[] = [];
  #running = 0;

  constructor(run: (namespace: Namespace, jobs: readonly J[]) => Promise<void>) {
    this.#run = run;
  }

  /** Settles when they have ended; what `run` rejects with, it rejects with. */
  async add(namespace: Namespace, jobs: readonly J[]): Promise<void> {
    const batches = new Set(jobs.map((job) => this.#place(namespace, job)));
    this.#start();
    await Promise.all([...batches].map(({ ended }) => ended));
  }

  #place(namespace: Namespace, job: J): Batch<J> {
    let batch = this.#waiting.at(-1);
    if (batch === undefined || batch.namespace.key !== namespace.key || batch.jobs.length >= maxBlocks) {
      let end: Batch<J>['end'] = () => {};
      const ended = new Promise<void>((resolve) => {
        end = resolve;
      });
      batch = { namespace, jobs: [], ended, end };
      this.#waiting.push(batch);
    }
    batch.jobs.push(job);
    return batch;
  }

  #start(): void {
    while (this.#running < maxRunning) {
      const batch = this.#waiting.shift();
      if (batch === undefined) return;
      this.#running++;
      const run = this.#run(batch.namespace, batch.jobs);
      batch.end(run);
      const next = (): void => {
        this.#running--;
        this.#start();
      };
      run.then(next, next);
    }
  }
}
