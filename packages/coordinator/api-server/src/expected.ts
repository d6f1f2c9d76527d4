/**
 * Workers that are not there and are expected soon: one that went silent a moment ago (a network that hiccups, a process that is started
 * again), or that is looked for since a moment (it joins; this coordinator has just begun). While nobody else is ready, requests wait for
 * them instead of failing. So is the next worker of a model whose last one has left.
 *
 * Invariants: a worker is expected for `awayMs` from when it went away, and no longer; one that drains or was refused is not. Who waits
 * is looked at when something changed, in the order in which they came and a few a turn, so that a crowd holds up nobody else; workers are
 * looked at once a turn for all who wait for the same model, and for each who waits for another than it has asked. They are as many as
 * requests may be in progress.
 */
import type { Worker } from '@kvtier/registry';
import type { Engines } from './engines.ts';

/** Whom a request may still be given. */
export interface Others {
  /** Names; undefined: any. */
  readonly among?: ReadonlySet<string> | undefined;
  /** Names of those that have been asked. */
  readonly except: ReadonlySet<string>;
}

export interface ExpectedOptions {
  readonly engines: Pick<Engines, 'workers'>;
  /** 0: nobody is expected. */
  readonly awayMs: number;
  /** Since when this model, or the last of any, has no worker; undefined: it has, or never had. */
  readonly leftAtMs?: (model?: string) => number | undefined;
  /** Told how many wait, when that changes. */
  readonly onWaiting?: (count: number) => void;
}

interface Waiting {
  readonly isOver: () => boolean;
  readonly end: () => void;
}

/** Go on in one turn at most, and are asked whether they do. */
const perTurn = 64;
const askedPerTurn = 1_024;

export class Expected {
  readonly awayMs: number;
  readonly #engines: ExpectedOptions['engines'];
  readonly #leftAtMs: (model?: string) => number | undefined;
  readonly #onWaiting: (count: number) => void;
  readonly #waiting = new Set<Waiting>();
  readonly #openedMs = performance.now();
  #look: NodeJS.Immediate | undefined;
  /** Those who have still to be asked since the change before; and whether there was another one since. */
  #rest: Iterator<Waiting> | undefined;
  #isChanged = false;
  /** While many are asked in one turn: what was found for the first of each model. */
  #found: { readonly untilMs: Map<string | undefined, number>; readonly isServed: Map<string, boolean> } | undefined;
  #closed = false;

  constructor({ engines, awayMs, leftAtMs = () => undefined, onWaiting = () => {} }: ExpectedOptions) {
    this.#engines = engines;
    this.#leftAtMs = leftAtMs;
    this.awayMs = awayMs;
    this.#onWaiting = onWaiting;
  }

  /** Nobody waits any more: who would goes on at once. */
  get isClosed(): boolean {
    return this.#closed;
  }

  /** performance.now() until which a worker that may serve this model is expected; undefined: of any model. In the past: nobody is. */
  untilMs(model?: string): number {
    return remembered(this.#found?.untilMs, model, () => this.#untilMs(model));
  }

  #untilMs(model: string | undefined): number {
    let untilMs = Number.NEGATIVE_INFINITY;
    if (this.#closed) return untilMs;
    const leftAtMs = this.#leftAtMs(model);
    if (leftAtMs !== undefined) untilMs = leftAtMs + this.awayMs;
    let isAlone = true;
    for (const worker of this.#engines.workers()) {
      if (worker === undefined) continue;
      isAlone = false;
      // What it serves is not known before it has said so.
      if (worker.facts !== undefined && model !== undefined && worker.facts.model !== model) continue;
      if (worker.awaySinceMs !== undefined) untilMs = Math.max(untilMs, worker.awaySinceMs + this.awayMs);
    }
    return isAlone ? Math.max(this.#openedMs + this.awayMs, untilMs) : untilMs;
  }

  /** The same of those alone that have said that they serve this model, and may be asked: who only might is not worth a wait. */
  otherUntilMs(model: string, others: Others): number {
    let untilMs = Number.NEGATIVE_INFINITY;
    if (this.#closed) return untilMs;
    for (const worker of this.#others(model, others))
      if (worker.awaySinceMs !== undefined) untilMs = Math.max(untilMs, worker.awaySinceMs + this.awayMs);
    return untilMs;
  }

  /** One of these takes requests. */
  isServedByOther(model: string, others: Others): boolean {
    for (const { state } of this.#others(model, others)) if (state === 'ready') return true;
    return false;
  }

  *#others(model: string, { among, except }: Others): Generator<Worker> {
    for (const worker of this.#engines.workers()) {
      if (worker?.facts?.model !== model) continue;
      const { name } = worker.record;
      if (!except.has(name) && (among?.has(name) ?? true)) yield worker;
    }
  }

  /** Some model has nobody who is ready, and somebody is expected: its requests will wait. */
  get isSought(): boolean {
    const nowMs = performance.now();
    if (this.untilMs() <= nowMs) return false;
    if ((this.#leftAtMs() ?? Number.NEGATIVE_INFINITY) + this.awayMs > nowMs) return true;
    const workers = this.#engines.workers().filter((worker) => worker !== undefined);
    return workers.length === 0 || workers.some((worker) => this.#isAway(worker, nowMs) && !this.isServed(worker));
  }

  /** Somebody takes requests for its model. */
  isServed({ facts }: { readonly facts: { readonly model: string } | undefined }): boolean {
    if (facts === undefined) return false;
    const { model } = facts;
    return remembered(this.#found?.isServed, model, () =>
      this.#engines.workers().some((worker) => worker?.state === 'ready' && worker.facts?.model === model),
    );
  }

  /** Until it is over, which is asked after each change, or until then. @throws the reason of `signal` */
  wait(isOver: () => boolean, untilMs: number, signal: AbortSignal): Promise<void> {
    if (signal.aborted) return Promise.reject(signal.reason);
    if (this.#closed) return Promise.resolve();
    return new Promise((resolve, reject) => {
      const settle = (how: () => void): void => {
        clearTimeout(timer);
        signal.removeEventListener('abort', leave);
        this.#waiting.delete(waiting);
        this.#onWaiting(this.#waiting.size);
        how();
      };
      const leave = (): void => settle(() => reject(signal.reason as Error));
      const waiting: Waiting = { isOver, end: () => settle(resolve) };
      const timer = setTimeout(waiting.end, Math.max(Math.ceil(untilMs - performance.now()), 1));
      signal.addEventListener('abort', leave, { once: true });
      this.#waiting.add(waiting);
      this.#onWaiting(this.#waiting.size);
    });
  }

  /** Workers or models are others than before. */
  changed(): void {
    if (this.#waiting.size === 0) return;
    this.#isChanged = true;
    this.#look ??= setImmediate(() => this.#lookOn());
  }

  /** Nobody waits any more. */
  close(): void {
    this.#closed = true;
    if (this.#look !== undefined) clearImmediate(this.#look);
    for (const { end } of [...this.#waiting]) end();
  }

  #isAway({ awaySinceMs }: Worker, nowMs: number): boolean {
    return awaySinceMs !== undefined && awaySinceMs + this.awayMs > nowMs;
  }

  #lookOn(): void {
    this.#look = undefined;
    let [asked, ended] = [0, 0];
    this.#found = { untilMs: new Map(), isServed: new Map() };
    try {
      for (;;) {
        const next = this.#next();
        if (next === undefined) return;
        if (next.isOver()) {
          next.end();
          ended++;
        }
        if (++asked >= askedPerTurn || ended >= perTurn) break;
      }
    } finally {
      this.#found = undefined;
    }
    this.#look ??= setImmediate(() => this.#lookOn());
  }

  /** Of all who wait, in their order; from the first on again after another change. undefined: all were asked. */
  #next(): Waiting | undefined {
    let next = this.#rest?.next();
    if ((next === undefined || next.done) && this.#isChanged) {
      this.#isChanged = false;
      this.#rest = this.#waiting.values();
      next = this.#rest.next();
    }
    if (next !== undefined && !next.done) return next.value;
    this.#rest = undefined;
    return undefined;
  }
}

function remembered<K, V>(found: Map<K, V> | undefined, key: K, find: () => V): V {
  const known = found?.get(key);
  if (known !== undefined) return known;
  const value = find();
  found?.set(key, value);
  return value;
}
