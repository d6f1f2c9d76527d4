/**
 * The API server's engine worker. It is asked again and again what it is (EngineCalls), the tokenizer of the model that answers is
 * loaded, and it is found again by itself after it was down.
 */

import { setTimeout as setTimer } from 'node:timers/promises';
import { KvError } from '@kvtier/errors';
import { EngineCalls } from '@kvtier/registry';
import type { Logger } from '@kvtier/telemetry';
import type { Description, GenerateEvent, GenerateRequest, PinPrefixRequest } from '@kvtier/wire/grpc';
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
  readonly #calls: EngineCalls;
  readonly #address: string;
  readonly #logger: Logger;
  readonly #text: Pick<TextPool, 'load'>;
  readonly #pollMs: number;
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
    this.#problem = new KvError('DISCONNECTED', `engine at ${this.#address}: not reached yet; try again in a moment`, {
      retry: true,
    });
    const { address, unaryDeadlineMs, silenceDeadlineMs } = options;
    this.#calls = new EngineCalls({
      address,
      ...(unaryDeadlineMs !== undefined && { unaryDeadlineMs }),
      ...(silenceDeadlineMs !== undefined && { silenceDeadlineMs }),
    });
  }

  /** Connections to the engine so far. */
  get connections(): number {
    return this.#calls.connections;
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
      const description = await this.#calls.describe();
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

  /** See EngineCalls. */
  generate(request: GenerateRequest, signal: AbortSignal): AsyncGenerator<GenerateEvent, void, void> {
    return this.#calls.generate(request, signal);
  }

  /** The engine's own metrics in Prometheus' text form. @throws KvError */
  metrics(): Promise<string> {
    return this.#calls.metrics();
  }

  /** Whether the engine's own prefix cache was dropped; false while blocks are held. @throws KvError */
  resetPrefixCache(): Promise<boolean> {
    return this.#calls.resetPrefixCache();
  }

  /** How many tokens of the prefix the engine holds from now on. @throws KvError: REQUEST (name in use), CONFIG (no room) */
  pinPrefix(request: PinPrefixRequest): Promise<number> {
    return this.#calls.pinPrefix(request);
  }

  /** False when nothing is pinned under this name. @throws KvError */
  unpinPrefix(name: string): Promise<boolean> {
    return this.#calls.unpinPrefix(name);
  }

  close(): void {
    this.#closed = true;
    clearTimeout(this.#timer);
    this.#calls.close();
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
}

const ignore = (): void => {};

const sameModel = (a: Description, b: Description): boolean =>
  a.model === b.model &&
  a.modelDir === b.modelDir &&
  a.vocabSize === b.vocabSize &&
  a.maxModelTokens === b.maxModelTokens;
