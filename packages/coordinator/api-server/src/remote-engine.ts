/**
 * The API server's line to its engine worker (gRPC). It asks Describe again and again, loads the tokenizer of the model that
 * answers, and finds the engine again by itself after it was down.
 *
 * Invariants: every wait has a deadline; a call that its caller no longer wants is cancelled, which frees its blocks.
 */

import { setTimeout as setTimer } from 'node:timers/promises';
import { type ClientReadableStream, Metadata, type ServiceError, status } from '@grpc/grpc-js';
import { KvError } from '@kvtier/errors';
import type { Logger } from '@kvtier/telemetry';
import {
  type Description,
  deadlineAfter,
  type EngineClient,
  fromFailure,
  fromStatus,
  type GenerateEvent,
  type GenerateRequest,
  type PinPrefixRequest,
} from '@kvtier/wire/grpc';
import { EngineClients } from './engine-clients.ts';
import type { LoadedText, TextPool } from './text-pool.ts';

/** Between two looks at an engine that is not there. */
const searchMs = 100;

export interface Model {
  readonly description: Description;
  readonly text: LoadedText;
  /** When this API server met the model, seconds since 1970: `created` of /v1/models. */
  readonly createdSeconds: number;
}

export interface RemoteEngineOptions {
  /** "unix:/path" or "127.0.0.1:port" */
  readonly address: string;
  readonly logger: Logger;
  /** Loads the text side of the model that answers. */
  readonly text: Pick<TextPool, 'load'>;
  /** Between two looks at the engine. */
  readonly pollMs?: number;
  /** For Describe, Metrics and ResetPrefixCache. */
  readonly unaryDeadlineMs?: number;
  /** A running request without any event for so long is given up. */
  readonly silenceDeadlineMs?: number;
}

export class RemoteEngine {
  readonly #clients: EngineClients;
  readonly #address: string;
  readonly #logger: Logger;
  readonly #text: Pick<TextPool, 'load'>;
  readonly #pollMs: number;
  readonly #unaryDeadlineMs: number;
  readonly #silenceDeadlineMs: number;
  #model: Model | undefined;
  #loading: { readonly description: Description; readonly model: Promise<Model> } | undefined;
  #isSearching = false;
  #problem: KvError;
  #reachable = false;
  #timer: NodeJS.Timeout | undefined;
  #closed = false;

  constructor(options: RemoteEngineOptions) {
    this.#address = options.address;
    this.#logger = options.logger;
    this.#text = options.text;
    this.#pollMs = options.pollMs ?? 1_000;
    this.#unaryDeadlineMs = options.unaryDeadlineMs ?? 2_000;
    this.#silenceDeadlineMs = options.silenceDeadlineMs ?? 600_000;
    this.#problem = new KvError('DISCONNECTED', `engine at ${this.#address}: not reached yet; try again in a moment`, {
      retry: true,
    });
    this.#clients = new EngineClients(options.address);
  }

  /** Connections to the engine so far. */
  get connections(): number {
    return this.#clients.opened;
  }

  /** The last look at the engine found it. */
  get reachable(): boolean {
    return this.#reachable;
  }

  /** The model that is served. @throws KvError: why there is none at the moment. */
  model(): Model {
    if (!this.#model) throw this.#problem;
    return this.#model;
  }

  /**
   * Looks for the engine until it is found or `firstContactMs` have passed, and keeps looking after that.
   * An engine that is not there yet is no failure: it may come. @throws KvError MODEL when its model cannot be served
   */
  async start(firstContactMs: number): Promise<void> {
    const end = performance.now() + firstContactMs;
    this.#isSearching = true;
    while (!this.#reachable) {
      try {
        await this.look();
      } catch (error) {
        if (error instanceof KvError && error.code === 'MODEL') throw error;
        if (performance.now() + searchMs >= end) break;
        await setTimer(searchMs);
      }
    }
    this.#isSearching = false;
    if (!this.#reachable) this.#logger.warn({ engine: this.#address, code: this.#problem.code }, this.#problem.message);
    this.#schedule();
  }

  /** One look at the engine. @throws KvError */
  async look(): Promise<Description> {
    try {
      const description = await this.#unary<Description>((client, deadline, done) =>
        client.describe({}, new Metadata(), { deadline }, done),
      );
      const known = this.#model && sameModel(this.#model.description, description) ? this.#model : undefined;
      this.#model = known ? { ...known, description } : await this.#load(description);
      if (!this.#reachable) this.#logger.info({ model: description.model, engine: this.#address }, 'engine reached');
      this.#reachable = true;
      return description;
    } catch (error) {
      const failure = KvError.from(error);
      if (failure.code === 'MODEL') this.#model = undefined;
      if (this.#reachable || failure.message !== this.#problem.message) {
        // While everything starts, an engine that is not there yet is no news.
        const level = this.#isSearching && failure.code !== 'MODEL' ? 'info' : 'warn';
        this.#logger[level]({ engine: this.#address, code: failure.code }, failure.message);
      }
      this.#problem = failure;
      this.#reachable = false;
      throw failure;
    }
  }

  /** Several looks at a new model load it once. */
  #load(description: Description): Promise<Model> {
    if (this.#loading && sameModel(this.#loading.description, description)) return this.#loading.model;
    const { model: name, modelDir, maxModelTokens, vocabSize } = description;
    const loaded = this.#text.load({ name, modelDir, maxModelTokens, vocabSize });
    const model = loaded.then((text) => ({ description, text, createdSeconds: Math.floor(Date.now() / 1000) }));
    const loading = { description, model };
    this.#loading = loading;
    const ended = (): void => {
      if (this.#loading === loading) this.#loading = undefined;
    };
    model.then(ended, ended);
    return model;
  }

  /**
   * One request; its events as they come. Ends after the event with a finish reason.
   * Leaving the loop, or `signal`, cancels the call. @throws KvError, or the reason of `signal`
   */
  async *generate(request: GenerateRequest, signal: AbortSignal): AsyncGenerator<GenerateEvent, void, void> {
    if (signal.aborted) throw signal.reason;
    const connection = this.#clients.begin();
    const call: ClientReadableStream<GenerateEvent> = connection.client.generate(request);
    call.on('error', ignore); // the loop below reports it; one that comes after the loop was left has nobody to tell
    const cancel = (): void => call.cancel();
    signal.addEventListener('abort', cancel, { once: true });
    let silent = false;
    let answered = false;
    call.once('status', ({ code }) => this.#clients.end(connection, code === status.CANCELLED));
    const watchdog = setTimeout(() => {
      silent = true;
      call.cancel();
    }, this.#silenceDeadlineMs);
    try {
      for await (const event of call.iterator({ destroyOnReturn: false }) as AsyncIterable<GenerateEvent>) {
        watchdog.refresh();
        answered = event.failure !== undefined || event.finishReason !== '';
        if (event.failure) throw fromFailure(event.failure);
        yield event;
        if (answered) return;
      }
      throw new KvError(
        'PROTOCOL',
        `engine at ${this.#address}: the answer ended without a finish reason; see its log`,
      );
    } catch (error) {
      if (signal.aborted) throw signal.reason;
      if (silent) {
        throw new KvError(
          'DEADLINE',
          `engine: no token for ${this.#silenceDeadlineMs / 1000} s; the request was given up`,
        );
      }
      throw this.#describeFailure(fromStatus(error));
    } finally {
      clearTimeout(watchdog);
      signal.removeEventListener('abort', cancel);
      if (answered) this.#awaitStatus(call);
      else call.cancel(); // of no effect on a call that has ended
    }
  }

  /** The engine has said all, and its status is under way: cancelling would only be one more reset (EngineClients). */
  #awaitStatus(call: ClientReadableStream<GenerateEvent>): void {
    const patience = setTimeout(() => call.cancel(), this.#unaryDeadlineMs);
    call.once('status', () => clearTimeout(patience));
    call.resume();
  }

  /** The engine's own metrics in Prometheus' text form. @throws KvError */
  async metrics(): Promise<string> {
    const answer = await this.#unary<{ prometheus: string }>((client, deadline, done) =>
      client.metrics({}, new Metadata(), { deadline }, done),
    );
    return answer.prometheus;
  }

  /** Whether the engine's own prefix cache was dropped; false while blocks are held. @throws KvError */
  async resetPrefixCache(): Promise<boolean> {
    const answer = await this.#unary<{ done: boolean }>((client, deadline, done) =>
      client.resetPrefixCache({}, new Metadata(), { deadline }, done),
    );
    return answer.done;
  }

  /** How many tokens of the prefix the engine holds from now on. @throws KvError: REQUEST (name in use), CONFIG (no room) */
  async pinPrefix(request: PinPrefixRequest): Promise<number> {
    const answer = await this.#unary<{ pinnedTokens: number }>((client, deadline, done) =>
      client.pinPrefix(request, new Metadata(), { deadline }, done),
    );
    return answer.pinnedTokens;
  }

  /** False when nothing is pinned under this name. @throws KvError */
  async unpinPrefix(name: string): Promise<boolean> {
    const answer = await this.#unary<{ done: boolean }>((client, deadline, done) =>
      client.unpinPrefix({ name }, new Metadata(), { deadline }, done),
    );
    return answer.done;
  }

  close(): void {
    this.#closed = true;
    clearTimeout(this.#timer);
    this.#clients.close();
  }

  #schedule(): void {
    if (this.#closed) return;
    this.#timer = setTimeout(
      () => {
        void this.look()
          .catch(ignore) // kept as #problem, logged once
          .finally(() => this.#schedule());
      },
      this.#reachable ? this.#pollMs : searchMs,
    );
    this.#timer.unref();
  }

  #unary<T>(
    start: (client: EngineClient, deadline: Date, done: (error: ServiceError | null, value: T) => void) => unknown,
  ): Promise<T> {
    const connection = this.#clients.begin();
    return new Promise<T>((resolve, reject) => {
      start(connection.client, deadlineAfter(this.#unaryDeadlineMs), (error, value) => {
        this.#clients.end(connection, error?.code === status.DEADLINE_EXCEEDED);
        if (error) return reject(error);
        this.#clients.answered();
        resolve(value);
      });
    }).catch((error: unknown) => {
      const failure = this.#describeFailure(fromStatus(error));
      // Nobody answers: for a client of the API server that is the same as nobody there.
      throw failure.code === 'DEADLINE' ? this.#gone('does not answer') : failure;
    });
  }

  /** grpc's words for a lost connection say little to a user. */
  #describeFailure(failure: KvError): KvError {
    if (failure.code === 'DISCONNECTED') return this.#gone('cannot be reached');
    // The call was cut by the other side: its server is closing.
    return failure.code === 'CANCELLED' ? this.#gone('ended the request') : failure;
  }

  #gone(what: string): KvError {
    const { refusal } = this.#clients;
    if (refusal) return new KvError('DISCONNECTED', `engine: ${refusal.message}`, { retry: true });
    return new KvError('DISCONNECTED', `engine at ${this.#address}: ${what}; it may be restarting, try again`, {
      retry: true,
    });
  }
}

const ignore = (): void => {};

const sameModel = (a: Description, b: Description): boolean =>
  a.model === b.model &&
  a.modelDir === b.modelDir &&
  a.vocabSize === b.vocabSize &&
  a.maxModelTokens === b.maxModelTokens;
