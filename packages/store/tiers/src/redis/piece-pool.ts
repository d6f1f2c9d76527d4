/**
 * A few connections to one server, and the jobs that wait for one. Reads go before writes. Invariant: a job ends by its deadline
 * (and a sweep), and if it was on a connection that fell silent, only after that connection is destroyed.
 */
import type { PieceConnection, PieceJob } from './piece-connection.ts';

export interface PiecePoolOptions {
  readonly connect: (on: { ready: () => void; end: (reason: string, wasReady: boolean) => void }) => PieceConnection;
  readonly connections: number;
  /** Jobs in flight on one connection. */
  readonly depth: number;
  /** A connection could not be made, or broke. */
  readonly onFailure: (reason: string) => void;
}

const sweepMs = 50;

export class PiecePool {
  readonly #options: PiecePoolOptions;
  readonly #connections = new Set<PieceConnection>();
  readonly #waiting = { get: new Queue<PieceJob>(), set: new Queue<PieceJob>() };
  #sweep: NodeJS.Timeout | undefined;
  #closed = false;

  constructor(options: PiecePoolOptions) {
    this.#options = options;
  }

  submit(job: PieceJob): void {
    if (this.#closed) {
      job.onDone('lost');
      return;
    }
    this.#waiting[job.kind].push(job);
    this.#sweep ??= setInterval(() => this.#expire(), sweepMs);
    this.#pump();
  }

  /** Nothing waits or moves. */
  get idle(): boolean {
    return this.#waitingCount === 0 && [...this.#connections].every(({ inFlight }) => inFlight === 0);
  }

  /** Every connection is destroyed and every job 'lost' when this returns. */
  close(reason: string): void {
    this.#closed = true;
    clearInterval(this.#sweep);
    this.#sweep = undefined;
    for (const connection of [...this.#connections]) connection.destroy(reason);
    this.#drop();
  }

  get #waitingCount(): number {
    return this.#waiting.get.count + this.#waiting.set.count;
  }

  #pump(): void {
    for (const connection of this.#connections) {
      while (connection.ready && connection.inFlight < this.#options.depth) {
        const job = this.#waiting.get.shift() ?? this.#waiting.set.shift();
        if (job === undefined) return;
        connection.send(job);
      }
    }
    const connecting = [...this.#connections].some(({ ready }) => !ready);
    if (this.#waitingCount > 0 && !connecting && this.#connections.size < this.#options.connections) this.#connect();
  }

  #connect(): void {
    if (this.#closed) return;
    const connection: PieceConnection = this.#options.connect({
      ready: () => this.#pump(),
      end: (reason, wasReady) => {
        this.#connections.delete(connection);
        if (this.#closed) return;
        // Without any connection, and none to be had, nothing that waits can be served.
        if (!wasReady && this.#connections.size === 0) this.#drop();
        this.#options.onFailure(reason);
        if (wasReady) this.#pump(); // else a server that takes no more connections would be asked without a pause
      },
    });
    this.#connections.add(connection);
  }

  #drop(): void {
    for (const queue of [this.#waiting.get, this.#waiting.set]) {
      for (let job = queue.shift(); job !== undefined; job = queue.shift()) job.onDone('lost');
    }
  }

  #expire(): void {
    const nowMs = performance.now();
    for (const connection of [...this.#connections]) {
      if (connection.deadlineMs < nowMs) connection.destroy('no answer within the time limit');
    }
    for (const queue of [this.#waiting.get, this.#waiting.set]) {
      while (queue.first !== undefined && queue.first.deadlineMs < nowMs) queue.shift()!.onDone('lost');
    }
    const busy = [...this.#connections].some(({ inFlight }) => inFlight > 0);
    if (busy || this.#waitingCount > 0) return;
    clearInterval(this.#sweep);
    this.#sweep = undefined;
  }
}

/** First in, first out, with a moving start: shift() of a long array would copy it. */
class Queue<J> {
  #jobs: J[] = [];
  #start = 0;

  get count(): number {
    return this.#jobs.length - this.#start;
  }

  get first(): J | undefined {
    return this.#jobs[this.#start];
  }

  push(job: J): void {
    this.#jobs.push(job);
  }

  shift(): J | undefined {
    const job = this.#jobs[this.#start];
    if (job === undefined) return undefined;
    this.#start++;
    if (this.#start > 1024 && this.#start * 2 > this.#jobs.length) {
      this.#jobs = this.#jobs.slice(this.#start);
      this.#start = 0;
    }
    return job;
  }
}
