/** One line to one worker, whatever its kind: what it asks of the fleet, and what the fleet asks of it. */
import type { KvError } from '@kvtier/errors';
import type { Share } from './sent-ledger.ts';
import type { StepLine } from './step-line.ts';
import type { Sent, WorkerFacts, WorkerLoad } from './worker.ts';

/** Who is told what a line learns. */
export interface LinkHost {
  /** The worker says what it is. Returns why it cannot be of this cluster, in one line; undefined: it can. */
  described(facts: WorkerFacts): string | undefined;
  /** It answers, and its load is known: it takes requests, unless it is `draining`. */
  answers(draining: boolean): void;
  /** Its connection is lost, or it does not answer. The line looks for it by itself. */
  lost(why: KvError): void;
  /** What it says cannot be. The line asks again by itself. */
  refused(why: string): void;
  /** A request ended. */
  ended(): void;
  /** It answers, and is to get nothing new for a while, for this reason; undefined: that is over. */
  rests(why: string | undefined): void;
  /** Another worker of its model takes requests, and none of them failed of late. */
  maySpare(): boolean;
  /** Prompt tokens a second, as the others of its model measure: for a worker that has not measured yet. Above 0. */
  usualPrefillTokensPerS(): number;
  /** Seconds that a request adds to a step, as the pods of its model measure together; 0: none has. */
  usualStepPerRequestS(): number;
  /** Blocks a second by medium, as those of its model measure, 0: none has; undefined: it has no cache node. */
  usualLoadBlocksPerS(): readonly number[] | undefined;
}

export interface Link {
  start(): void;
  /** At once: what runs is cut. */
  close(): Promise<void>;
  /** Requests that were sent, or run, and have not ended. */
  readonly open: number;
  /** As it has measured itself; 0: not yet. */
  readonly measuredPrefillTokensPerS: number;
  /** The same by medium: blocks a second that it brings in. */
  readonly measuredLoadBlocksPerS: readonly number[];
  /** Of a pod: its steps by the requests that run. */
  readonly stepLine?: StepLine;
  /** The last of its requests failed. */
  readonly isFailing?: boolean;
  /** Now, with what was sent since the worker told it. */
  load(): WorkerLoad;
  send(share: Share): Sent;
  /** Of requests that go there by another way than this line: one goes; something of an answer has just come; it is good. */
  went?(): void;
  heard?(): void;
  succeeded?(): void;
  /** One failed there, and how; or there or on its way. */
  failed?(why: string): void;
  doubted?(): void;
}

/** For workers beyond loopback. */
export interface Access {
  /** PEM: the authority of the workers' certificates; undefined: those that the system knows (openai alone). */
  readonly ca?: Buffer | undefined;
  /** PEM: our certificate and its key. */
  readonly cert?: Buffer | undefined;
  readonly key?: Buffer | undefined;
  /** The name in the workers' certificates; undefined: their host's. */
  readonly serverName?: string | undefined;
  /** For openai workers: "authorization: Bearer TOKEN". */
  readonly token?: string | undefined;
  /** openai workers are reached in plain text, and without proving who we are. */
  readonly trustedNetwork?: boolean;
  /** They are shown the token there, too. */
  readonly tokenInClear?: boolean;
}

export interface LinkTimes {
  /** For one short question. */
  readonly askMs: number;
  /** Without any word of the worker it is silent; it speaks at least every 500 ms. */
  readonly silentMs: number;
  /** The same of an openai worker: without an answer to a scrape, or anything of a request's. */
  readonly podSilentMs: number;
  /** A scrape that is so late makes it silent though its answers come: what others have there is not known any more. */
  readonly podBlindMs: number;
  /** Between two looks for a worker that is silent: at first, and at most. */
  readonly firstPauseMs: number;
  readonly pauseMs: number;
  /** Between two looks at a worker that was refused. */
  readonly refusedPauseMs: number;
  /** Between two words of a worker's load: least. */
  readonly loadMs: number;
  /** Between two scrapes of an openai worker, and for one. */
  readonly scrapeMs: number;
  /** So long a worker that was never there is taken to be starting: a model takes its time to load. Then it is worth a warning. */
  readonly startMs: number;
}

export const linkTimes: LinkTimes = {
  askMs: 800,
  silentMs: 850,
  podSilentMs: 800,
  podBlindMs: 10_000,
  firstPauseMs: 20,
  pauseMs: 500,
  refusedPauseMs: 2_000,
  loadMs: 20,
  scrapeMs: 250,
  startMs: 10_000,
};

/** Nothing is known of it. */
export const noLoad: WorkerLoad = {
  waiting: 0,
  running: 0,
  tokensAhead: 0,
  stepTokens: 0,
  stepBegunAtMs: 0,
  usedBlocks: 0,
  waitingBlocks: 0,
  freedBlocksPerS: 0,
  loadAheadS: 0,
  prefillTokensPerS: 1,
  stepS: 0,
  stepPerRequestS: 0,
  loadBlocksPerS: [],
  toldAtMs: 0,
};

/** Waits that `stop` ends at once. */
export class Pause {
  #timer: NodeJS.Timeout | undefined;
  #go: (() => void) | undefined;
  #stopped = false;

  get stopped(): boolean {
    return this.#stopped;
  }

  wait(ms: number): Promise<void> {
    if (this.#stopped) return Promise.resolve();
    return new Promise((resolve) => {
      this.#go = resolve;
      this.#timer = setTimeout(resolve, ms);
    });
  }

  stop(): void {
    this.#stopped = true;
    clearTimeout(this.#timer);
    this.#go?.();
  }
}
