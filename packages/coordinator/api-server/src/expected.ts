/**
 * Workers that are not there and are expected soon: one that went silent a moment ago (a network that hiccups, a process that is started
 * again), or that is looked for since a moment (it joins; this coordinator has just begun). While nobody else is ready, requests wait for
 * them instead of failing. So is the next worker of a model whose last one has left.
 *
 * Invariants: a worker is expected for `awayMs` from when it went away, and no longer; one that drains or was refused is not. Who waits
 * is looked at once for each change, in the order in which they came and a few a turn, so that a crowd holds up nobody else: who waits
 * again behind a change has seen it. Workers are looked at once a turn for all who wait for the same model. They are as many as requests
 * may be in progress.
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
  /** Another one for each who waits, in their order. */
  readonly place: number;
  readonly isOver: () => boolean;
  readonly end: () => void;
}

/** Of one model, for all who are asked in one turn. */
interface Found {
  readonly untilMs: Map<string | undefined, number>;
  readonly isServed: Map<string, boolean>;
  readonly away: Map<string, readonly Worker[]>;
  readonly ready: Map<string, readonly unknown[]>;
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
  /** Of those who wait: the last one that came, and the last one that is asked because of the change. */
  #lastPlace = 0;
  #lastAsked = 0;
  /** While many are asked in one turn: what was found for the first of each model. */
  #found: Found | undefined;
  /** By model, as it was when somebody asked last. */
  readonly #ready = new Map<string, readonly unknown[]>();
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

  /**
   * The same of those alone that have said that they serve this model, and may be asked: who only might is not worth a wait. Nor is one
   * that computes prompts for others: it takes no request while another one is ready.
   */
  otherUntilMs(model: string, { among, except }: Others): number {
    if (this.#closed) return Number.NEGATIVE_INFINITY;
    const away = remembered(this.#found?.away, model, () => this.#away(model));
    const isOther = ({ record: { name } }: Worker): boolean => !except.has(name) && (among?.has(name) ?? true);
    return (away.find(isOther)?.awaySinceMs ?? Number.NEGATIVE_INFINITY) + this.awayMs;
  }

  /** Who takes requests for this model, of whatever role: the same object while they are the same ones. */
  readyOf(model: string): readonly unknown[] {
    return remembered(this.#found?.ready, model, () => {
      const ready: unknown[] = [];
      for (const worker of this.#engines.workers())
        if (worker?.state === 'ready' && worker.facts?.model === model)
          ready.push(worker, worker.facts, worker.record.role);
      const before = this.#ready.get(model);
      if (before?.length === ready.length && before.every((one, i) => one === ready[i])) return before;
      this.#ready.set(model, ready);
      return ready;
    });
  }

  /** Those that may serve it, whoever went last first. */
  #away(model: string): Worker[] {
    const away: Worker[] = [];
    for (const worker of this.#engines.workers())
      if (worker?.facts?.model === model && worker.awaySinceMs !== undefined && worker.record.role !== 'prefill')
        away.push(worker);
    return away.sort((a, b) => b.awaySinceMs! - a.awaySinceMs!);
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
        if (this.#waiting.size === 0) this.#ready.clear();
        this.#onWaiting(this.#waiting.size);
        how();
      };
      const leave = (): void => settle(() => reject(signal.reason as Error));
      const waiting: Waiting = { place: ++this.#lastPlace, isOver, end: () => settle(resolve) };
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
    this.#found = { untilMs: new Map(), isServed: new Map(), away: new Map(), ready: new Map() };
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

  /** Of all who waited at the change, in their order; from the first on again after another change. undefined: all were asked. */
  #next(): Waiting | undefined {
    const next = this.#nextAsked();
    if (next !== undefined || !this.#isChanged) return next;
    this.#isChanged = false;
    this.#rest = this.#waiting.values();
    this.#lastAsked = this.#lastPlace;
    return this.#nextAsked();
  }

  #nextAsked(): Waiting | undefined {
    const next = this.#rest?.next();
    if (next !== undefined && !next.done && next.value.place <= this.#lastAsked) return next.value;
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
