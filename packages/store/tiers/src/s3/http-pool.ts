/**
 * Connections to one origin, kept for the next exchange. Invariant: never more than `maxConnections` are open; who gets one
 * waits in order and not beyond its deadline. Idle ones are closed after a while, before most servers do it.
 */
import { KvError } from '@kvtier/errors';
import { HttpConnection, type HttpReply, type HttpRequest, type Origin, type TryLimits } from './http-connection.ts';

const idleMs = 20_000;

interface Waiter {
  readonly give: () => void;
  readonly timer: NodeJS.Timeout;
}

export class HttpPool {
  readonly #origin: Origin;
  readonly #maxConnections: number;
  readonly #idle: HttpConnection[] = [];
  readonly #open = new Set<HttpConnection>();
  readonly #waiting = new Set<Waiter>();
  /** Exchanges that run or are about to: at most `maxConnections`. */
  #running = 0;
  #sweeper: NodeJS.Timeout | undefined;
  #closed = false;

  constructor(origin: Origin, maxConnections: number) {
    this.#origin = origin;
    this.#maxConnections = maxConnections;
  }

  /** KvError of `HttpConnection.send`, or DEADLINE when no connection came free in time. */
  async send(request: HttpRequest, limits: TryLimits): Promise<HttpReply> {
    await this.#enter(limits.deadlineMs);
    try {
      // A connection that was idle may have been closed by the server meanwhile: then a fresh one, at once.
      for (;;) {
        if (this.#closed) throw new KvError('DISCONNECTED', 'the client was closed');
        const connection = this.#idle.pop() ?? this.#connect();
        const wasUsed = connection.exchangeCount > 0;
        try {
          return await connection.send(request, limits);
        } catch (error) {
          const mayBeStale =
            wasUsed && request.method === 'GET' && ['IO', 'DISCONNECTED'].includes(KvError.from(error).code);
          if (!mayBeStale || performance.now() > limits.deadlineMs) throw error;
        }
      }
    } finally {
      this.#leave();
    }
  }

  close(): void {
    this.#closed = true;
    clearTimeout(this.#sweeper);
    for (const connection of [...this.#open]) connection.destroy();
    for (const waiter of [...this.#waiting]) waiter.give();
  }

  #connect(): HttpConnection {
    const connection = new HttpConnection(
      this.#origin,
      (one) => this.#keep(one),
      (one) => this.#forget(one),
    );
    this.#open.add(connection);
    return connection;
  }

  #keep(connection: HttpConnection): void {
    this.#idle.push(connection);
    this.#sweeper ??= setTimeout(() => {
      this.#sweeper = undefined;
      for (const idle of [...this.#idle]) idle.destroy();
    }, idleMs).unref();
  }

  #forget(connection: HttpConnection): void {
    this.#open.delete(connection);
    const at = this.#idle.indexOf(connection);
    if (at !== -1) this.#idle.splice(at, 1);
  }

  #enter(deadlineMs: number): Promise<void> {
    if (this.#running < this.#maxConnections) {
      this.#running++;
      return Promise.resolve();
    }
    return new Promise((resolve, reject) => {
      const waiter: Waiter = {
        give: () => {
          this.#waiting.delete(waiter);
          clearTimeout(waiter.timer);
          this.#running++;
          resolve();
        },
        timer: setTimeout(
          () => {
            this.#waiting.delete(waiter);
            reject(new KvError('DEADLINE', 'no connection came free in time'));
          },
          Math.max(1, deadlineMs - performance.now()),
        ),
      };
      this.#waiting.add(waiter);
    });
  }

  #leave(): void {
    this.#running--;
    const [first] = this.#waiting;
    first?.give();
  }
}
