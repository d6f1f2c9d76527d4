/**
 * The line to a pod with OpenAI's API (vLLM, SGLang): it is asked what it serves, then its metrics are scraped again and again, and
 * requests go there as they came, their answers back as they come.
 *
 * A scrape that fails makes it silent: it gets nothing new. Its answers under way go on, for they may be well while its metrics are slow;
 * those that have not begun end after `unansweredMs` of silence (to be tried elsewhere), all others after `stuckMs`.
 *
 * Invariants: every wait has a deadline, every body that is read whole a bound; nothing is buffered between pod and caller but a
 * socket's share; a caller that leaves, or its `signal`, ends the request at the pod.
 */
import type { IncomingHttpHeaders } from 'node:http';
import { KvError } from '@kvtier/errors';
import { runningTimeout } from '@kvtier/runtime';
import { type Dispatcher, Pool } from 'undici';
import { z } from 'zod';
import { checked } from './facts.ts';
import { type Access, type Link, type LinkHost, type LinkTimes, noLoad, Pause } from './link.ts';
import { expectedLoads } from './load-rates.ts';
import { PodLoad } from './pod-load.ts';
import { type Scrape, scrapeOf } from './scrape.ts';
import type { Share } from './sent-ledger.ts';
import type { Sent, WorkerFacts, WorkerLoad } from './worker.ts';

/** The answer of an openai worker, as it comes. */
export interface Forwarded {
  readonly status: number;
  readonly headers: IncomingHttpHeaders;
  /**
   * Leaving the loop ends the request, and so does `leave`, which waits for nothing. @throws KvError DISCONNECTED, or the reason of the
   * request's signal
   */
  readonly body: AsyncIterable<Buffer>;
}

/** Nobody wants the body: a pod may never begin it. */
export async function leave({ body }: Forwarded): Promise<void> {
  await body[Symbol.asyncIterator]().return?.();
}

export interface OpenaiLinkOptions {
  readonly name: string;
  readonly origin: URL;
  readonly access: Access | undefined;
  readonly host: LinkHost;
  readonly times: LinkTimes;
}

const [mostModelsBytes, mostMetricsBytes] = [1 << 20, 8 << 20];
const maxConnections = 1_024;
/** Requests at once; more are refused with BUSY. */
const maxOpen = 4_096;
const [unansweredMs, stuckMs] = [2_000, 10_000];
/** Of one answer: until it begins, and between two parts of it. */
const silenceMs = 600_000;

/** Of one hop; the next one makes its own. */
const hop = new Set(
  'connection keep-alive proxy-connection transfer-encoding te trailer upgrade host content-length expect'.split(' '),
);

const modelsSchema = z.object({
  data: z
    .array(
      z.object({
        id: z.string().min(1).max(1024),
        max_model_len: z
          .number()
          .int()
          .min(1)
          .max(2 ** 40)
          .nullish(),
      }),
    )
    .min(1),
});

interface Running {
  answered: boolean;
  readonly cut: AbortController;
}

export class OpenaiLink implements Link {
  readonly #options: OpenaiLinkOptions;
  /** For requests, and another for what we ask: neither waits for the other. */
  readonly #pool: Pool;
  readonly #asks: Pool;
  readonly #pod = new PodLoad();
  readonly #running = new Set<Running>();
  readonly #pause = new Pause();
  readonly #closing = new AbortController();
  #totalBlocks = 0;
  #blockTokens = 0;
  #run: Promise<void> | undefined;

  constructor(options: OpenaiLinkOptions) {
    this.#options = options;
    const { ca, cert, key, serverName } = options.access ?? {};
    const connect = {
      timeout: options.times.askMs,
      ...(ca && { ca }),
      ...(cert && key && { cert, key }),
      ...(serverName !== undefined && { servername: serverName }),
    };
    const { origin } = options.origin;
    this.#pool = new Pool(origin, {
      connections: maxConnections,
      pipelining: 1,
      connect,
      headersTimeout: silenceMs,
      bodyTimeout: silenceMs,
    });
    this.#asks = new Pool(origin, { connections: 1, pipelining: 1, connect });
  }

  start(): void {
    this.#run ??= this.#watch();
  }

  async close(): Promise<void> {
    this.#pause.stop();
    this.#closing.abort();
    const left = new KvError('DISCONNECTED', `worker ${this.#options.name}: has left; try again`, { retry: true });
    for (const { cut } of this.#running) cut.abort(left);
    await Promise.all([this.#pool.destroy(), this.#asks.destroy()]);
    await this.#run;
  }

  get open(): number {
    return Math.max(this.#pod.open, this.#running.size);
  }

  get measuredPrefillTokensPerS(): number {
    return this.#pod.prefillTokensPerS;
  }

  /** No pod tells it. */
  get measuredLoadBlocksPerS(): readonly number[] {
    return noLoad.loadBlocksPerS;
  }

  load(): WorkerLoad {
    const { host } = this.#options;
    const load = this.#pod.load(this.#totalBlocks, host.usualPrefillTokensPerS());
    const usual = this.#blockTokens > 0 ? host.usualLoadBlocksPerS() : undefined;
    if (usual === undefined) return load;
    const computedBlocksPerS = load.prefillTokensPerS / this.#blockTokens;
    return { ...load, loadBlocksPerS: expectedLoads(load.loadBlocksPerS, usual, computedBlocksPerS) };
  }

  send(share: Share): Sent {
    return this.#pod.send(share, performance.now(), () => this.#options.host.ended());
  }

  /** One request (POST), as it came; `headers` without those of one hop. @throws KvError BUSY, DISCONNECTED, or the reason of `signal` */
  async forward(
    path: string,
    headers: Readonly<Record<string, string>>,
    body: Uint8Array | string,
    signal: AbortSignal,
  ): Promise<Forwarded> {
    const { name } = this.#options;
    if (signal.aborted) throw signal.reason;
    if (this.#running.size >= maxOpen) {
      throw new KvError('BUSY', `worker ${name}: ${maxOpen} requests are under way there; try again later`, {
        retry: true,
      });
    }
    const running: Running = { answered: false, cut: new AbortController() };
    const cancel = (): void => running.cut.abort(signal.reason);
    signal.addEventListener('abort', cancel, { once: true });
    this.#running.add(running);
    const ended = (): void => {
      signal.removeEventListener('abort', cancel);
      if (this.#running.delete(running)) this.#options.host.ended();
    };
    try {
      const answer = await this.#pool.request({
        path,
        method: 'POST',
        headers: { ...passedOn(headers), ...this.#authorization() },
        body: typeof body === 'string' ? body : Buffer.from(body.buffer, body.byteOffset, body.byteLength),
        signal: running.cut.signal,
      });
      running.answered = true;
      const kept = passedOn(answer.headers) as IncomingHttpHeaders;
      return { status: answer.statusCode, headers: kept, body: this.#parts(answer.body, running, ended) };
    } catch (error) {
      ended();
      throw this.#failure(error, running);
    }
  }

  #parts(body: Dispatcher.ResponseData['body'], running: Running, ended: () => void): AsyncIterable<Buffer> {
    body.once('close', ended);
    body.on('error', () => {}); // of one that is left before it was read
    const failure = (error: unknown): unknown => this.#failure(error, running);
    const end = (): void => {
      body.destroy();
      ended();
    };
    const parts = (async function* () {
      try {
        for await (const part of body) yield part as Buffer;
      } catch (error) {
        throw failure(error);
      } finally {
        end();
      }
    })();
    const iterator: AsyncIterator<Buffer> = {
      next: () => parts.next(),
      // A generator that was not begun ends without its `finally`, and one that waits for a part ends after it.
      return: () => {
        end();
        return parts.return(undefined);
      },
    };
    return { [Symbol.asyncIterator]: () => iterator };
  }

  #authorization(): Readonly<Record<string, string>> {
    const { token } = this.#options.access ?? {};
    return token === undefined ? {} : { authorization: `Bearer ${token}` };
  }

  /** Whoever cut it says why. */
  #failure(error: unknown, { cut }: Running): unknown {
    if (cut.signal.aborted) return cut.signal.reason;
    return this.#gone((error as Error).message);
  }

  #gone(why: string): KvError {
    const { name, origin } = this.#options;
    const what = `${origin.origin} cannot be reached or broke off (${why}); it may be restarting, try again`;
    return new KvError('DISCONNECTED', `worker ${name}: ${what}`, { retry: true });
  }

  async #watch(): Promise<void> {
    const { name, host, times } = this.#options;
    let pauseMs = times.firstPauseMs;
    let goodAtMs = performance.now();
    while (!this.#pause.stopped) {
      let refused = false;
      try {
        let facts = await this.#describe();
        this.#described(facts);
        for (;;) {
          const begunAtMs = performance.now();
          const openThen = this.#pod.open;
          const scrape = await this.#scrape();
          if (epochOf(this.#options.origin, scrape) !== facts.bootEpoch)
            throw new KvError('DISCONNECTED', `worker ${name}: was started anew; asked again`, { retry: true });
          goodAtMs = performance.now();
          const learned = { ...facts, ...cacheOf(scrape, facts) };
          if (learned.blockTokens !== facts.blockTokens || learned.totalBlocks !== facts.totalBlocks) {
            this.#described(learned);
            facts = learned;
          }
          this.#pod.scraped(scrape, begunAtMs, openThen, goodAtMs);
          pauseMs = times.firstPauseMs;
          host.answers(scrape.asleep);
          await this.#pause.wait(times.scrapeMs);
          if (this.#pause.stopped) return;
        }
      } catch (thrown) {
        if (this.#pause.stopped) return;
        const error = KvError.from(thrown);
        refused = error.code === 'CONFIG' || error.code === 'PROTOCOL';
        if (refused) host.refused(error.message);
        else {
          host.lost(error);
          this.#cut(error, performance.now() - goodAtMs);
        }
      }
      await this.#pause.wait(refused ? times.refusedPauseMs : pauseMs);
      if (!refused) pauseMs = Math.min(times.pauseMs, pauseMs * 2);
    }
  }

  /** @throws KvError CONFIG: it cannot be of this cluster */
  #described(facts: WorkerFacts): void {
    const why = this.#options.host.described(facts);
    if (why !== undefined) throw new KvError('CONFIG', why);
    this.#totalBlocks = facts.totalBlocks;
    this.#blockTokens = facts.blockTokens;
  }

  #cut(why: KvError, silentForMs: number): void {
    for (const { answered, cut } of this.#running)
      if (silentForMs > stuckMs || (!answered && silentForMs > unansweredMs)) cut.abort(why);
  }

  async #describe(): Promise<WorkerFacts> {
    const { name, origin } = this.#options;
    await this.#ask('/health', mostModelsBytes);
    let models: unknown;
    const text = await this.#ask('/v1/models', mostModelsBytes);
    try {
      models = JSON.parse(text);
    } catch {
      throw new KvError(
        'PROTOCOL',
        `worker ${name}: /v1/models is no JSON; give the address of an OpenAI-compatible server`,
      );
    }
    const [model] = checked(name, '/v1/models', modelsSchema, models).data;
    const scrape = await this.#scrape();
    return {
      model: model!.id,
      modelDigest: '',
      modelDir: '',
      maxModelTokens: model!.max_model_len ?? 0,
      vocabSize: 0,
      stopTokenIds: [],
      ...cacheOf(scrape, { blockTokens: 0, totalBlocks: 0, hashAlgorithm: '' }),
      hashSeed: '',
      blockBytes: 0,
      maxRunning: undefined,
      namespaces: undefined,
      bootEpoch: epochOf(origin, scrape),
    };
  }

  async #scrape(): Promise<Scrape> {
    return await scrapeOf(this.#options.name, await this.#ask('/metrics', mostMetricsBytes));
  }

  /** A short body, whole. @throws KvError DISCONNECTED: no 200 in time; PROTOCOL: longer than `mostBytes` */
  async #ask(path: string, mostBytes: number): Promise<string> {
    const { name, times } = this.#options;
    const limit = runningTimeout(times.askMs); // who stood still ourselves blames no pod
    const signal = AbortSignal.any([limit.signal, this.#closing.signal]);
    try {
      const { statusCode, body } = await this.#asks.request({
        path,
        method: 'GET',
        headers: this.#authorization(),
        signal,
      });
      const parts: Buffer[] = [];
      let bytes = 0;
      for await (const part of body) {
        bytes += (part as Buffer).length;
        if (bytes > mostBytes)
          throw new KvError('PROTOCOL', `worker ${name}: ${path} is longer than ${mostBytes} bytes; check the address`);
        parts.push(part as Buffer);
      }
      if (statusCode === 200) return Buffer.concat(parts).toString('utf8');
      if (statusCode >= 400 && statusCode < 500) {
        const remedy =
          statusCode === 401 || statusCode === 403 ? 'configure its token' : 'serve vLLM’s or SGLang’s API there';
        throw new KvError('PROTOCOL', `worker ${name}: ${path} answers ${statusCode}; ${remedy}`);
      }
      throw new Error(`${path} answers ${statusCode}`);
    } catch (error) {
      if (error instanceof KvError) throw error;
      throw this.#gone(
        (error as Error).name === 'TimeoutError'
          ? `${path}: no answer within ${times.askMs} ms`
          : (error as Error).message,
      );
    } finally {
      limit.end();
    }
  }
}

/** Of one life of the pod's process, as far as its metrics tell. */
const epochOf = ({ origin }: URL, { startedAt }: Scrape): string => (startedAt === '' ? '' : `${origin} ${startedAt}`);

type CacheFacts = Pick<WorkerFacts, 'blockTokens' | 'totalBlocks' | 'hashAlgorithm'>;

/** What a scrape says of the blocks; what it does not say is as before: engines know some of it only after they began to answer. */
const cacheOf = ({ blockTokens, totalBlocks, hashAlgorithm }: Scrape, before: CacheFacts): CacheFacts => ({
  blockTokens: blockTokens ?? before.blockTokens,
  totalBlocks: totalBlocks ?? before.totalBlocks,
  hashAlgorithm: hashAlgorithm || before.hashAlgorithm,
});

function passedOn(headers: IncomingHttpHeaders | Readonly<Record<string, string>>): Record<string, string | string[]> {
  const kept: Record<string, string | string[]> = {};
  for (const [name, value] of Object.entries(headers))
    if (value !== undefined && !hop.has(name.toLowerCase())) kept[name] = value;
  return kept;
}
