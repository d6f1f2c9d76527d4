/**
 * Requests that no worker is ready for, while one that may serve them has just gone silent or still joins: they wait a moment for it
 * instead of failing, for most come back (a network that hiccups, a process that is started again).
 *
 * Bounded: so many requests, each until the worker has been away for `awayMs`: one that is away for longer is not away for a moment. When workers change, those that have somebody now are woken, in the order in which they
 * came and a few a turn: a crowd that waited must not hold up what else goes on.
 */
import type { Worker } from '@kvtier/registry';
import type { Pending } from './pending.ts';
import type { Workers } from './ports.ts';

export interface AbsentOptions {
  readonly workers: Pick<Workers, 'workers'>;
  /** So long a worker that was there is expected back; 0: not at all. */
  readonly awayMs: number;
  /** Requests that wait at most. */
  readonly maxHeld: number;
  /** Whether somebody is ready for it. */
  readonly isServed: (pending: Pending) => boolean;
}

/** Woken in one turn at most. */
const perTurn = 64;

export class Absent {
  readonly #options: AbsentOptions;
  readonly #waiting = new Map<Pending, () => void>();
  /** By number, the name of a worker that is away, and since when. */
  readonly #away: ({ readonly name: string; readonly sinceMs: number } | undefined)[] = [];
  #look: NodeJS.Immediate | undefined;

  constructor(options: AbsentOptions) {
    this.#options = options;
  }

  get size(): number {
    return this.#waiting.size;
  }

  /** performance.now() until which a worker that may serve it is expected back; 0: none is, or too many wait already. */
  expectedByMs(pending: Pending): number {
    const { workers, awayMs, maxHeld } = this.#options;
    let byMs = 0;
    if (this.#waiting.size >= maxHeld) return byMs;
    for (const [number, worker] of workers.workers().entries()) {
      const away = this.#away[number];
      if (away !== undefined && worker !== undefined && mayServe(pending, worker))
        byMs = Math.max(byMs, away.sinceMs + awayMs);
    }
    return byMs;
  }

  /** Until it is worth asking again, or until then. @throws the reason of `signal` */
  wait(pending: Pending, untilMs: number, signal: AbortSignal): Promise<void> {
    return new Promise((resolve, reject) => {
      const end = (settle: () => void): void => {
        clearTimeout(timer);
        signal.removeEventListener('abort', leave);
        this.#waiting.delete(pending);
        settle();
      };
      const leave = (): void => end(() => reject(signal.reason as Error));
      const timer = setTimeout(() => end(resolve), Math.max(Math.ceil(untilMs - performance.now()), 1));
      signal.addEventListener('abort', leave, { once: true });
      this.#waiting.set(pending, () => end(resolve));
    });
  }

  /** Some worker is another one than before. */
  changed(): void {
    this.#note();
    if (this.#waiting.size > 0) this.#look ??= setImmediate(() => this.#wake());
  }

  close(): void {
    if (this.#look !== undefined) clearImmediate(this.#look);
    for (const wake of [...this.#waiting.values()]) wake();
  }

  #note(): void {
    const workers = this.#options.workers.workers();
    for (let number = 0; number < Math.max(workers.length, this.#away.length); number++) {
      const worker = workers[number];
      if (worker === undefined || !isAway(worker)) this.#away[number] = undefined;
      else if (this.#away[number]?.name !== worker.record.name)
        this.#away[number] = { name: worker.record.name, sinceMs: performance.now() };
    }
  }

  #wake(): void {
    this.#look = undefined;
    let woken = 0;
    for (const [pending, wake] of this.#waiting) {
      if (!this.#options.isServed(pending) && this.expectedByMs(pending) > 0) continue;
      wake();
      if (++woken < perTurn) continue;
      this.#look = setImmediate(() => this.#wake());
      return;
    }
  }
}

/** It was there, and may come back: one that leaves or was refused is not waited for. */
const isAway = ({ state, record }: Worker): boolean => (state === 'silent' || state === 'joining') && !record.draining;

const mayServe = (pending: Pending, worker: Worker): boolean =>
  worker.facts?.model === pending.request.model && worker.record.role !== 'prefill' && pending.allows(worker);
