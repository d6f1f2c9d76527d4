/**
 * The threads that work on clients' texts (understand.ts), so that the event loop never parses, renders or tokenizes them:
 *
 *   body ─► queue ─► thread 0: small bodies only ─► parameters and token ids, or why not
 *                └─► thread 1: any body, a small one if it has waited (text-queue.ts)
 *
 * Large bodies never keep small ones waiting, and who reads them stands back in the queue for a CPU: the event loop, and with it every
 * stream, goes first. A small body of token ids alone has no text, and is read at once (ids-at-once.ts).
 *
 * Invariants: every job ends: with its outcome, at `waitMs` in the queue, at `jobMs` in a thread (the thread is ended, and
 * another one takes its place), or with its client. A thread that dies, of too much memory for example, costs its one job.
 */
import { Worker } from 'node:worker_threads';
import { KvError } from '@kvtier/errors';
import { keepFolds } from '@kvtier/kv-index';
import { bundleOf } from '@kvtier/telemetry';
import { TokenTable, type TokenTableParts } from './detokenizer.ts';
import { HttpError } from './errors.ts';
import { idsAtOnce } from './ids-at-once.ts';
import { ownBound } from './own-bound.ts';
import type { TextModel } from './text-model.ts';
import { type Taker, TextQueue } from './text-queue.ts';
import { type BodyKind, keysIn, type Understood } from './understand.ts';

export interface TextJob {
  readonly kind: BodyKind | 'load';
  /** Those that are served: the body names one. Of a load, the one. */
  readonly models: readonly {
    readonly model: TextModel;
    /** Differs after every load: the model's files may have changed. */
    readonly generation: number;
  }[];
  readonly body: ArrayBuffer;
}

export type TextFailure =
  | { readonly kind: 'model'; readonly message: string }
  | { readonly kind: 'defect'; readonly message: string }
  | {
      readonly kind: 'refused';
      readonly status: number;
      readonly message: string;
      readonly param: string | undefined;
      readonly code: string | undefined;
      readonly type: string;
    };

/** What a thread answers, and says once when it is `ready` for jobs. */
export interface TextOutcome {
  readonly ready?: true;
  readonly value?: unknown;
  /** Of each prompt's keys in `value`: the index checks a prompt by them, and the event loop does not make them. */
  readonly folds?: readonly Int32Array[];
  readonly failure?: TextFailure;
  /** Of a load: as `Tokenizer.chatProblem`. */
  readonly chatProblem?: string | undefined;
  /** The model whose tokenizer was read anew for it: not all fit (kept-tokenizers.ts). */
  readonly reread?: string | undefined;
}

/** What a thread is told at its start. */
export interface TextThreadData {
  /** Of the thread alone. */
  readonly niceness: number;
  /** Of the thread's heap. */
  readonly heapMiB: number;
}

/** A model whose texts the threads can work on. */
export interface LoadedText {
  readonly model: TextModel;
  readonly generation: number;
  readonly table: TokenTable;
  /** As `Tokenizer.chatProblem`. */
  readonly chatProblem?: string | undefined;
}

export interface TextPoolOptions {
  readonly threads?: number;
  /** Of a job in the queue. */
  readonly waitMs?: number;
  /** Of a job in a thread, with reading the tokenizer if the thread is new. */
  readonly jobMs?: number;
  /** Of the largest body: threads get heaps that have room for it. */
  readonly bodyBytes?: number;
  /** Of a thread's heap, instead. */
  readonly heapMiB?: number;
  /** A model's tokenizer was read anew for a body: those of all models are too large for a thread's heap. */
  readonly onReread?: (model: string, heapMiB: number) => void;
}

/** Of a thread's heap at least: tokenizers take most of it. */
const leastHeapMiB = 1_024;
/**
 * Times the largest body. Tokenizers leave a third of a heap (kept-tokenizers.ts), and a body takes eight times itself at most: its text, if
 * one character takes two bytes, the same once more in what it says, and once more where that is counted. A text for which a heap has no
 * room at all ends not the thread but the process.
 */
const heapPerBody = 24;

export const heapMiBFor = (bodyBytes: number): number =>
  Math.max(leastHeapMiB, Math.ceil((heapPerBody * bodyBytes) / 2 ** 20));

/** Of the threads that read large bodies (setpriority(2)): a tenth of what the event loop gets where both want the same CPU. */
export const largeBodiesNiceness = 10;
/** Of a thread's start, before its first job. */
const startMs = 60_000;
/** More jobs are refused. */
const maxWaiting = 4_096;
const threadProgram = new URL('./text-thread.ts', import.meta.url); // JavaScript in a bundle (scripts/lib/programs.mjs)
/** A thread does not inherit what reads TypeScript: it begins with that, and a second of a CPU goes into it. */
const fromSource = (): URL =>
  new URL(
    `data:text/javascript,${encodeURIComponent(
      `import { register } from ${JSON.stringify(import.meta.resolve('tsx/esm/api'))};
       register();
       await import(${JSON.stringify(threadProgram.href)});`,
    )}`,
  );
function entryOf(): URL | string {
  if (!threadProgram.pathname.endsWith('.ts')) return threadProgram;
  return bundleOf('threads/text-thread.mjs') ?? fromSource();
}
const threadEntry = entryOf();

interface Waiting {
  readonly job: TextJob;
  readonly settle: (outcome: TextOutcome | Error) => void;
}

class TextThread implements Taker {
  readonly #heapMiB: number;
  readonly takesLarge: boolean;
  readonly isHelper: boolean;
  readonly #niceness: number;
  #worker: Worker | undefined;
  #isReady = false;
  #running: { readonly settle: Waiting['settle']; readonly jobMs: number; timer: NodeJS.Timeout } | undefined;

  constructor(takesLarge: boolean, isHelper: boolean, heapMiB: number) {
    this.takesLarge = takesLarge;
    this.isHelper = isHelper;
    this.#niceness = isHelper ? largeBodiesNiceness : 0;
    this.#heapMiB = heapMiB;
    this.#worker = this.#open(); // while the engine is looked for
  }

  get idle(): boolean {
    return this.#running === undefined;
  }

  start({ job, settle }: Waiting, jobMs: number): void {
    this.#worker ??= this.#open();
    this.#running = { settle, jobMs, timer: this.#timer(this.#isReady ? jobMs : startMs) };
    this.#worker.postMessage(job, job.body.byteLength === 0 ? [] : [job.body]);
  }

  async close(why: Error): Promise<void> {
    const worker = this.#worker;
    this.#end(why);
    await worker?.terminate();
  }

  #timer(ms: number): NodeJS.Timeout {
    return setTimeout(() => this.#end(tookTooLong(ms)), ms);
  }

  #onMessage(outcome: TextOutcome): void {
    if (!outcome.ready) {
      this.#settle(outcome);
      return;
    }
    this.#isReady = true;
    const running = this.#running;
    if (!running) return;
    clearTimeout(running.timer);
    running.timer = this.#timer(running.jobMs);
  }

  #open(): Worker {
    this.#isReady = false;
    const worker = new Worker(threadEntry, {
      execArgv: [],
      workerData: { niceness: this.#niceness, heapMiB: this.#heapMiB } satisfies TextThreadData,
      resourceLimits: { maxOldGenerationSizeMb: this.#heapMiB },
    });
    worker.unref(); // a process that has nothing else to do may end
    worker.on('message', (outcome: TextOutcome) => {
      if (this.#worker === worker) this.#onMessage(outcome);
    });
    // Both come after its last message.
    worker.on('error', (error: NodeJS.ErrnoException) => {
      if (this.#worker !== worker) return;
      this.#end(error.code === 'ERR_WORKER_OUT_OF_MEMORY' ? tookTooMuch() : error);
    });
    worker.on('exit', (code) => {
      if (this.#worker === worker) this.#end(new Error(`a text thread ended by itself (${code})`));
    });
    return worker;
  }

  #settle(outcome: TextOutcome | Error): void {
    const running = this.#running;
    this.#running = undefined;
    if (!running) return;
    clearTimeout(running.timer);
    running.settle(outcome);
  }

  /** Whatever it is doing; the next job gets a new thread. */
  #end(why: Error): void {
    void this.#worker?.terminate();
    this.#worker = undefined;
    this.#settle(why);
  }
}

export class TextPool {
  readonly #threads: readonly TextThread[];
  readonly #waitMs: number;
  readonly #jobMs: number;
  readonly #onReread: (model: string) => void;
  readonly #queue = new TextQueue<Waiting>();
  #help: NodeJS.Timeout | undefined;
  #generation = 0;
  #closed = false;

  constructor(options: TextPoolOptions = {}) {
    const { threads = 2, waitMs = 30_000, jobMs = 30_000, bodyBytes = 0, onReread = () => {} } = options;
    const { heapMiB = heapMiBFor(bodyBytes) } = options;
    // One that is alone reads small bodies, too: whole requests wait for it.
    this.#threads = Array.from({ length: threads }, (_, at) =>
      threads === 1 ? new TextThread(true, false, heapMiB) : new TextThread(at > 0, at > 0, heapMiB),
    );
    this.#waitMs = waitMs;
    this.#jobMs = jobMs;
    this.#onReread = (model) => onReread(model, heapMiB);
  }

  /** Reads the model's text side in all threads. @throws KvError MODEL: a file is missing or damaged */
  async load(model: TextModel): Promise<LoadedText> {
    const generation = ++this.#generation;
    if (model.modelDir === '') return { model, generation, table: noTokens };
    const load = (thread: TextThread) =>
      this.#run({ kind: 'load', models: [{ model, generation }], body: new ArrayBuffer(0) }, undefined, thread);
    const [first] = await Promise.all(this.#threads.map(load));
    const { value, chatProblem } = first!;
    return { model, generation, table: new TokenTable(value as TokenTableParts), chatProblem };
  }

  /**
   * What a body asks for, of these models (one or more). `body` may move to a thread, and is empty then. @throws HttpError: what the client is told,
   * KvError: BUSY (queue), DEADLINE, or the reason of `signal`
   */
  async run<K extends BodyKind>(
    kind: K,
    served: readonly LoadedText[],
    body: ArrayBuffer,
    signal?: AbortSignal,
  ): Promise<Understood[K]> {
    const here = idsAtOnce(
      kind,
      served.map(({ model }) => model),
      body,
    );
    if (here !== undefined && !this.#closed && !signal?.aborted) return here as Understood[K];
    const models = served.map(({ model, generation }) => ({ model, generation }));
    const { value, folds = [], reread } = await this.#run({ kind, models, body }, signal);
    if (reread !== undefined) this.#onReread(reread);
    keysIn(value as Understood[K]).forEach((keys, prompt) => void keepFolds(keys, folds[prompt]!));
    return value as Understood[K];
  }

  async close(): Promise<void> {
    this.#closed = true;
    clearTimeout(this.#help);
    for (const waiting of this.#queue.takeAll()) waiting.settle(closing());
    await Promise.all(this.#threads.map((thread) => thread.close(closing())));
  }

  #run(job: TextJob, signal?: AbortSignal, thread?: TextThread): Promise<TextOutcome> {
    if (this.#closed) return Promise.reject(closing());
    if (signal?.aborted) return Promise.reject(signal.reason);
    if (this.#queue.length >= maxWaiting) return Promise.reject(ownBound(`${maxWaiting} requests wait to be read`));
    return new Promise((resolve, reject) => {
      const settle = (outcome: TextOutcome | Error): void => {
        clearTimeout(timer);
        signal?.removeEventListener('abort', leave);
        if (outcome instanceof Error) reject(outcome);
        else if (outcome.failure) reject(asError(outcome.failure));
        else resolve(outcome);
        this.#dispatch();
      };
      const waiting: Waiting = { job, settle };
      /** Out of the queue; of no effect on what runs. */
      const drop = (why: Error): void => {
        if (this.#queue.remove(waiting)) settle(why);
      };
      const leave = (): void => drop(signal!.reason as Error);
      const timer = setTimeout(
        () => drop(ownBound(`the request waited ${this.#waitMs / 1_000} s to be read`)),
        this.#waitMs,
      );
      signal?.addEventListener('abort', leave, { once: true });
      this.#queue.push(waiting, job.body.byteLength, performance.now(), thread);
      this.#dispatch();
    });
  }

  #dispatch(): void {
    const nowMs = performance.now();
    let isAnyIdle = false;
    for (const thread of this.#threads) {
      if (!thread.idle) continue;
      const next = this.#queue.take(thread, nowMs);
      if (next) thread.start(next, this.#jobMs);
      else isAnyIdle = true;
    }
    if (!isAnyIdle || this.#help !== undefined) return;
    const helpIn = this.#queue.helpIn(nowMs);
    if (helpIn === undefined) return;
    const help = (): void => {
      this.#help = undefined;
      this.#dispatch();
    };
    this.#help = setTimeout(help, Math.ceil(helpIn)).unref();
  }
}

function asError(failure: TextFailure): Error {
  if (failure.kind === 'model') return new KvError('MODEL', failure.message);
  if (failure.kind === 'defect') return new Error(failure.message);
  const { status, message, param, code, type } = failure;
  return new HttpError(status, message, { param, type, ...(code === undefined ? {} : { code }) });
}

/** Of a model whose answers are text already. */
const noTokens = new TokenTable({ bytes: new Uint8Array(0), ends: new Uint32Array(0), literal: [] });

const closing = (): KvError => new KvError('DISCONNECTED', 'the API server is closing; try again', { retry: true });
const tookTooLong = (ms: number): KvError =>
  new KvError('DEADLINE', `the API server: the body was not read within ${ms / 1_000} s; send less`);
const tookTooMuch = (): HttpError =>
  new HttpError(413, 'The body takes too much memory to be read; send less.', { code: 'request_too_large' });
