/**
 * POST /v1/completions and /v1/chat/completions: from a body to an answer, whole or streamed.
 *
 *   body ─► (text threads) its model, parameters and token ids ─► answers at workers ─► JSON, or server-sent events
 *                                │                                                     (written-answers.ts)
 *                                └► of a model whose workers have OpenAI's API: as it came (forwarding.ts)
 *
 * Invariants: until the first token nothing is written, so every failure before it has its HTTP status. A client that
 * leaves, at any moment, ends its calls at the workers. Answers running at once are bounded.
 */
import { randomUUID } from 'node:crypto';
import type { IncomingHttpHeaders } from 'node:http';
import { Outdated, sessionIn, type Targets, targetsIn } from '@kvtier/dispatch';
import { KvError } from '@kvtier/errors';
import { type Logger, traceparentOf } from '@kvtier/telemetry';
import type { FastifyReply, FastifyRequest } from 'fastify';
import { runAnswers } from './answers.ts';
import { type Body, bodyOf } from './bodies.ts';
import { BodyReader, type Read, type ToPass } from './body-reader.ts';
import { badParameter, toHttpError } from './errors.ts';
import { forward } from './forwarding.ts';
import type { RequestMetrics } from './metrics.ts';
import type { Models } from './models.ts';
import { ownBound } from './own-bound.ts';
import { Placed } from './placed.ts';
import type { Totals, Workplace } from './plan.ts';
import type { Endpoint } from './replies.ts';
import { type RequestTrace, traceRequest } from './request-log.ts';
import { type Progress, RunningAnswers } from './running-answers.ts';
import type { TextPool } from './text-pool.ts';
import { whyNoTransfer } from './transfer.ts';
import { collect, type OnDelta, stream, type Written } from './written-answers.ts';

/** OpenAI's default for completions. A chat goes on to the model's end. */
const completionMaxTokens = 16;
/** A body is read again while tokenizers are replaced, so often at most. */
const maxReads = 4;

/** A request that was understood. */
interface Job extends Written {
  readonly arrivedMs: number;
  /** What it came from; not wanted any more once a worker was chosen. */
  readonly body: Body;
  readonly signal: AbortSignal;
  readonly trace: RequestTrace;
}

/** What a request's headers say. */
interface AskedFor {
  readonly arrivedMs: number;
  readonly targets: Targets;
  /** Empty: they name none, as its body may. */
  readonly session: string;
  /** W3C's; undefined: they bear none. */
  readonly traceparent: string | undefined;
  readonly trace: RequestTrace;
}

export interface GenerationOptions {
  readonly models: Models;
  readonly place: Workplace;
  readonly text: TextPool;
  /** What is less than it should be, of the whole coordinator: for headers. */
  readonly degraded: () => readonly string[];
  /** Names of the KV index's media, by their numbers. */
  readonly media: readonly string[];
  readonly metrics: RequestMetrics;
  readonly logger: Logger;
  /** Whether who sends these headers administers. */
  readonly isAdmin: (headers: IncomingHttpHeaders) => boolean;
  /** Until the first token of a request that does not say so itself; undefined: as late as it comes. */
  readonly ttftMs: number | undefined;
  /** A log line for each request. */
  readonly logRequests: boolean;
  /** Answers generated at once, of all requests; more are refused with 429. */
  readonly maxRunning: number;
  /** Of bodies that wait for their workers' answers, of all requests. */
  readonly heldBytes: number;
  /** A client that takes nothing of its stream for so long is cut off. */
  readonly unreadMs: number;
}

export class Generation {
  readonly #options: GenerationOptions;
  readonly #reader: BodyReader;
  readonly #running: RunningAnswers;
  readonly #aborts = new Set<AbortController>();
  /** Of bodies that are passed on, until their answers begin. */
  #passedBytes = 0;

  constructor(options: GenerationOptions) {
    this.#options = options;
    const { models, text, place, maxRunning, metrics } = options;
    this.#running = new RunningAnswers(
      maxRunning,
      () => models.count,
      (count) => metrics.running.set(count),
    );
    this.#reader = new BodyReader({ models, text, expected: place.expected });
  }

  /** For /health. */
  get progress(): Progress {
    return this.#running.progress;
  }

  /** Ends every running request. */
  abortAll(): void {
    const reason = new KvError('DISCONNECTED', 'the API server is closing; try again', { retry: true });
    for (const abort of this.#aborts) abort.abort(reason);
  }

  completions(request: FastifyRequest, reply: FastifyReply): Promise<unknown> {
    return this.#answer('completion', request, reply);
  }

  chat(request: FastifyRequest, reply: FastifyReply): Promise<unknown> {
    return this.#answer('chat', request, reply);
  }

  async #answer(endpoint: Endpoint, request: FastifyRequest, reply: FastifyReply): Promise<unknown> {
    const arrivedMs = performance.now();
    const abort = new AbortController();
    const onClose = (): void => {
      // A connection closes behind a whole answer, too.
      if (!reply.raw.writableFinished) abort.abort(new KvError('CANCELLED', 'the client ended the request'));
    };
    reply.raw.once('close', onClose);
    if (reply.raw.destroyed) onClose();
    this.#aborts.add(abort);
    const { logRequests, logger } = this.#options;
    const trace = logRequests ? traceRequest(request, reply, arrivedMs, logger) : {};
    try {
      const targets = targetsIn(request.headers, this.#options.ttftMs);
      const session = sessionIn(request.headers);
      const traceparent = traceparentOf(request.headers.traceparent);
      const asked: AskedFor = { arrivedMs, targets, session, traceparent, trace };
      for (let leftReads = maxReads; ; leftReads--) {
        try {
          return await this.#once(endpoint, request, reply, asked, abort.signal);
        } catch (error) {
          // Its tokens are no words of the workers that are there now.
          if (!(error instanceof Outdated) || leftReads <= 1 || !bodyOf(request).isKept) throw error;
        }
      }
    } catch (error) {
      trace.failure = (error as Error).message;
      throw error;
    } finally {
      reply.raw.off('close', onClose);
      this.#aborts.delete(abort);
    }
  }

  /** @throws Outdated: nothing was written; the body is read again, where it is kept */
  async #once(
    endpoint: Endpoint,
    request: FastifyRequest,
    reply: FastifyReply,
    asked: AskedFor,
    signal: AbortSignal,
  ): Promise<unknown> {
    const body = bodyOf(request);
    const { arrivedMs } = asked;
    const read = await this.#reader.read(endpoint, body, arrivedMs, signal);
    // Unique, unlike x-request-id, which a client may choose: workers tell their requests apart by it.
    const requestId = randomUUID();
    const placed = new Placed(this.#options.degraded(), this.#options.media);
    const model = 'held' in read ? read.model : read.readFor.name;
    Object.assign(asked.trace, { requestId, model, placed });
    if ('held' in read) {
      body.drop(); // its worker reads it by itself
      this.#checkTransfer(read, request);
      const passed = { ...read, session: asked.session || read.session };
      const forward = () => this.#forward(request, reply, requestId, passed, placed, asked, signal);
      return this.#running.counted(model, 1, false, forward);
    }
    const job = this.#job(endpoint, requestId, read, asked, { placed, arrivedMs, body, signal });
    const generate = (onDelta: OnDelta): Promise<Totals> => this.#run(job, onDelta);
    const { logger, unreadMs } = this.#options;
    const taken = (): void => void this.#running.signOfLife();
    return this.#running.counted(model, job.echoes.length, true, () =>
      read.params.stream ? stream(job, reply, generate, { logger, unreadMs, taken }) : collect(job, reply, generate),
    );
  }

  /** @throws HttpError 400: it says what a pod would believe, and its client may not */
  #checkTransfer({ transferIn }: ToPass, { headers }: FastifyRequest): void {
    const { place, isAdmin } = this.#options;
    if (transferIn === undefined || place.pods.config.clientParams || isAdmin(headers)) return;
    const allowed = 'send it with a key of adminKeysFile, or let all clients (podHandOff.clientParams)';
    throw badParameter(transferIn, `${whyNoTransfer(transferIn)}, ${allowed}.`, 'transfer_not_allowed');
  }

  #job(
    endpoint: Endpoint,
    requestId: string,
    { readFor: model, params: read, prompts, keys, echoes }: Exclude<Read, ToPass>,
    { targets, session, traceparent, trace }: AskedFor,
    rest: Pick<Job, 'placed' | 'arrivedMs' | 'body' | 'signal'>,
  ): Job {
    const params = session === '' ? read : { ...read, session };
    const defaultMaxTokens = endpoint === 'chat' ? Number.POSITIVE_INFINITY : completionMaxTokens;
    return {
      endpoint,
      plan: {
        ...{ requestId, traceparent, model, prompts, keys, params, defaultMaxTokens },
        ...{ arrivedMs: rest.arrivedMs, targets },
      },
      head: {
        id: `${endpoint === 'chat' ? 'chatcmpl' : 'cmpl'}-${requestId}`,
        created: Math.floor(Date.now() / 1000),
        model: model.name,
      },
      echoes: echoes.flatMap((echo) => Array<string>(params.n).fill(echo)),
      trace,
      ...rest,
    };
  }

  async #forward(
    request: FastifyRequest,
    reply: FastifyReply,
    requestId: string,
    body: ToPass,
    placed: Placed,
    { arrivedMs, targets, trace }: AskedFor,
    signal: AbortSignal,
  ): Promise<unknown> {
    const { place, metrics, unreadMs, logger, heldBytes } = this.#options;
    const { held } = body;
    const { byteLength } = held;
    if (this.#passedBytes + byteLength > heldBytes)
      throw ownBound(`bodies of more than ${heldBytes} bytes would wait for their workers`);
    this.#passedBytes += byteLength;
    const letGo = (): void => {
      if (held.letGo()) this.#passedBytes -= byteLength;
    };
    try {
      await forward(request, reply, {
        place,
        path: request.routeOptions.url!,
        requestId,
        body,
        placed,
        arrivedMs,
        ttftMs: targets.ttftMs,
        unreadMs,
        signal,
        logger,
        begun: letGo,
        retried: (error) => metrics.countRetry(error),
        usage: (usage) => metrics.countUsage(usage),
        pause: (elapsedMs) => metrics.pauseSeconds.observe(elapsedMs / 1000),
        firstToken: () => {
          trace.firstTokenAtMs = performance.now();
          metrics.firstTokenSeconds.observe((trace.firstTokenAtMs - arrivedMs) / 1000);
        },
      });
      // What a pod refuses is over in a moment, and no answer.
      if (reply.raw.statusCode === 200) metrics.requestSeconds.observe((performance.now() - arrivedMs) / 1000);
    } catch (error) {
      if (!reply.raw.headersSent) throw error;
      const level = toHttpError(error).status === 499 ? 'debug' : 'warn';
      logger[level]({ request: requestId }, `answer cut: ${(error as Error).message}`);
    } finally {
      letGo();
    }
    return reply;
  }

  async #run(job: Job, onDelta: OnDelta): Promise<Totals> {
    const { place, metrics, logger } = this.#options;
    let first = true;
    /** Of each answer, when its last tokens came. */
    const toldAtMs = new Map<number, number>();
    const totals = await runAnswers(place, job.plan, job.signal, {
      delta: (delta) => {
        const nowMs = this.#running.signOfLife();
        if (first) metrics.firstTokenSeconds.observe((nowMs - job.arrivedMs) / 1000);
        if (first) job.trace.firstTokenAtMs = nowMs;
        first = false;
        if (delta.tokenIds.length > 0) {
          const beforeMs = toldAtMs.get(delta.index);
          if (beforeMs !== undefined) metrics.pauseSeconds.observe((nowMs - beforeMs) / 1000);
          toldAtMs.set(delta.index, nowMs);
        }
        return onDelta(delta);
      },
      chosen: (choice, moved) => {
        job.body.drop(); // its tokens were good for a worker
        job.placed.chosen(choice);
        if (!moved) return;
        metrics.moves.inc();
        const { name } = choice.worker.record;
        logger.info(
          { request: job.plan.requestId, worker: name },
          'an answer that had begun goes on at another worker',
        );
      },
      handedOff: (choice, state) => job.placed.handedOff(choice, state),
      retried: (error, choice) => {
        job.placed.retried(choice);
        metrics.countRetry(error);
      },
    });
    metrics.requestSeconds.observe((performance.now() - job.arrivedMs) / 1000);
    metrics.countTokens(totals);
    return totals;
  }
}
