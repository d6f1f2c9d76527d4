/**
 * Who watches the engine's load: one message at each change, no sooner than asked for after the one before, and a sign of life. That
 * nothing is left to do is told at once: who chooses in these milliseconds would take what has ended for a stream that it slows down. Messages
 * are put together in a turn of their own, so that a request and the number that names it are always in the same one.
 *
 * Invariants: an engine that nobody watches pays nothing; one who does not read costs at most `mostPending` numbers, and is cut off
 * then; of each request a watcher is told once that it was taken, that it runs, and that it is over, in the message whose figures are the
 * first that say so; of all that are here when it begins to watch, so that it knows at each message what the figures count.
 */
import { KvError } from '@kvtier/errors';
import type { EngineLoadFigures } from '@kvtier/scheduler';
import { type EngineLoad, toStatus, type WatchLoadRequest } from '@kvtier/wire/grpc';

/** The call, as far as it is used here. */
export interface WatchCall {
  readonly request: WatchLoadRequest;
  write(load: EngineLoad): boolean;
  end(): void;
  emit(event: 'error', error: unknown): boolean;
  on(event: 'cancelled' | 'drain', listener: () => void): unknown;
}

export interface LoadWatchesOptions {
  readonly load: () => EngineLoadFigures;
  readonly draining: () => boolean;
  readonly bootEpoch: string;
}

const leastIntervalMs = 20;
/** Between two messages at most; half of what is promised. */
const lifeMs = 250;
const mostWatches = 64;
const mostPending = 65_536;

interface Watch {
  readonly call: WatchCall;
  readonly sender: string;
  readonly intervalMs: number;
  count: number;
  lastMs: number;
  /** Numbers that it was not told yet. */
  taken: number[];
  begun: number[];
  ended: number[];
  timer: NodeJS.Timeout | undefined;
  /** Its buffer is full. */
  blocked: boolean;
  /** Figures of the last message, in one line; and whether they count a request. */
  told: string;
  saidBusy: boolean;
}

export class LoadWatches {
  readonly #options: LoadWatchesOptions;
  readonly #watches = new Set<Watch>();
  /** Numbers of the requests that are here, by sender, and whether they run. */
  readonly #here = new Map<string, Map<number, boolean>>();
  #life: NodeJS.Timeout | undefined;
  #changing = false;

  constructor(options: LoadWatchesOptions) {
    this.#options = options;
  }

  /** Tells this call from now on, until it ends. */
  add(call: WatchCall): void {
    if (this.#watches.size >= mostWatches) {
      const full = new KvError('BUSY', `engine: ${mostWatches} watch its load already; end one`, { retry: true });
      call.emit('error', toStatus(full));
      return;
    }
    const { sender, minIntervalMs } = call.request;
    const here = [...(this.#here.get(sender) ?? [])];
    const watch: Watch = {
      call,
      sender,
      intervalMs: Math.min(lifeMs, Math.max(leastIntervalMs, minIntervalMs)),
      count: 0,
      lastMs: Number.NEGATIVE_INFINITY,
      taken: here.map(([number]) => number),
      begun: here.filter(([, runs]) => runs).map(([number]) => number),
      ended: [],
      timer: undefined,
      blocked: false,
      told: '',
      saidBusy: false,
    };
    this.#watches.add(watch);
    call.on('cancelled', () => this.#remove(watch));
    call.on('drain', () => {
      watch.blocked = false;
      this.#due(watch);
    });
    this.#life ??= setInterval(() => {
      for (const each of this.#watches) this.#send(each);
    }, lifeMs);
    this.#life.unref();
    this.#send(watch);
  }

  /** Something of the load has changed. */
  changed(): void {
    if (this.#watches.size === 0 || this.#changing) return;
    this.#changing = true;
    setImmediate(() => {
      this.#changing = false;
      for (const watch of this.#watches) this.#due(watch);
    });
  }

  /** The engine has taken this request in. */
  taken(sender: string, number: number): void {
    const here = this.#here.get(sender) ?? new Map<number, boolean>();
    this.#here.set(sender, here.set(number, false));
    this.#note(sender, 'taken', number);
  }

  /** It has its first token. */
  begun(sender: string, number: number): void {
    const here = this.#here.get(sender);
    if (here?.get(number) !== false) return;
    here.set(number, true);
    this.#note(sender, 'begun', number);
  }

  /** It has ended. */
  over(sender: string, number: number): void {
    const here = this.#here.get(sender);
    if (!here?.delete(number)) return;
    if (here.size === 0) this.#here.delete(sender);
    this.#note(sender, 'ended', number);
  }

  close(): void {
    for (const watch of this.#watches) {
      this.#remove(watch);
      watch.call.end();
    }
  }

  #note(sender: string, what: 'taken' | 'begun' | 'ended', number: number): void {
    for (const watch of this.#watches) {
      if (watch.sender !== sender) continue;
      watch[what].push(number);
      if (watch[what].length > mostPending) this.#cut(watch);
    }
  }

  #due(watch: Watch): void {
    if (watch.blocked) return;
    const waitMs = watch.lastMs + watch.intervalMs - performance.now();
    if (waitMs <= 0 || this.#isFree(watch)) {
      clearTimeout(watch.timer);
      watch.timer = undefined;
      this.#send(watch, true);
      return;
    }
    if (watch.timer !== undefined) return;
    watch.timer = setTimeout(() => {
      watch.timer = undefined;
      this.#send(watch, true);
    }, waitMs);
  }

  /** Nothing is left to do, and the last message said otherwise. */
  #isFree({ saidBusy }: Watch): boolean {
    if (!saidBusy) return false;
    const { waiting, running } = this.#options.load();
    return waiting + running === 0;
  }

  /** `onChange`: nothing, when it would say what the one before said. */
  #send(watch: Watch, onChange = false): void {
    if (watch.blocked || !this.#watches.has(watch)) return;
    const { load, draining, bootEpoch } = this.#options;
    const figures = load();
    const { waiting, running, tokensAhead, stepTokens, stepForS, usedBlocks, totalBlocks, waitingBlocks, loadAheadS } =
      figures;
    const drains = draining();
    const now = `${waiting} ${running} ${tokensAhead} ${stepTokens} ${usedBlocks} ${waitingBlocks} ${loadAheadS} ${drains}`;
    const { taken, begun, ended } = watch;
    const names = taken.length + begun.length + ended.length;
    if (onChange && names === 0 && now === watch.told) return;
    watch.told = now;
    watch.saidBusy = waiting + running > 0;
    const { prefillTokensPerS, prefillStepS, pacingTrust, stepS, stepPerRequestS, freedBlocksPerS, loadBlocksPerS } =
      figures;
    [watch.taken, watch.begun, watch.ended] = [[], [], []];
    watch.lastMs = performance.now();
    watch.blocked = !watch.call.write({
      bootEpoch,
      count: BigInt(++watch.count),
      draining: drains,
      waiting,
      running,
      tokensAhead: BigInt(tokensAhead),
      ...(stepTokens > 0 && { step: { tokens: stepTokens, forS: stepForS } }),
      usedBlocks: BigInt(usedBlocks),
      totalBlocks: BigInt(totalBlocks),
      waitingBlocks: BigInt(waitingBlocks),
      loadAheadS,
      rates: {
        ...{ prefillTokensPerS, prefillStepS, pacingTrust, stepS, stepPerRequestS, freedBlocksPerS },
        loadBlocksPerS: { ...loadBlocksPerS },
      },
      ...{ taken, begun, ended },
    });
  }

  #cut(watch: Watch): void {
    this.#remove(watch);
    const unread = `the stream of its load is not read (${mostPending} requests since)`;
    watch.call.emit('error', toStatus(new KvError('BUSY', `engine: ${unread}; watch again`, { retry: true })));
  }

  #remove(watch: Watch): void {
    clearTimeout(watch.timer);
    this.#watches.delete(watch);
    if (this.#watches.size > 0) return;
    clearInterval(this.#life);
    this.#life = undefined;
  }
}
