/**
 * POST /v1/completions and /v1/chat/completions: from a body to an answer, whole or streamed.
 *
 *   body ─► (text threads) parameters and token ids ─► answers at the engine ─► JSON, or server-sent events
 *
 * Invariants: until the first token nothing is written, so every failure before it has its HTTP status. A client that
 * leaves, at any moment, ends its calls at the engine. Answers running at once are bounded.
 */
import { randomUUID } from 'node:crypto';
import { KvError } from '@kvtier/errors';
import type { Logger } from '@kvtier/telemetry';
import type { FastifyReply, FastifyRequest } from 'fastify';
import { type Delta, type Plan, runAnswers, type Totals } from './answers.ts';
import { bodyOf } from './bodies.ts';
import { toHttpError } from './errors.ts';
import type { RequestMetrics } from './metrics.ts';
import type { RemoteEngine } from './remote-engine.ts';
import { type Answer, chunksOf, type Endpoint, kvtierOf, type ReplyHead, usageChunk, wholeReply } from './replies.ts';
import { EventStream } from './sse.ts';
import type { TextPool } from './text-pool.ts';

/** OpenAI's default for completions. A chat goes on to the model's end. */
const completionMaxTokens = 16;

/** A request that was understood. */
interface Job {
  readonly endpoint: Endpoint;
  readonly plan: Plan;
  readonly head: ReplyHead;
  readonly defaultMaxTokens: number;
  /** Text that each answer starts with (`echo`). */
  readonly echoes: readonly string[];
  readonly arrivedMs: number;
  readonly signal: AbortSignal;
}

export interface GenerationOptions {
  readonly remote: RemoteEngine;
  readonly text: TextPool;
  readonly metrics: RequestMetrics;
  readonly logger: Logger;
  /** Answers generated at once, of all requests; more are refused with 429. */
  readonly maxRunning: number;
  /** A client that takes nothing of its stream for so long is cut off. */
  readonly unreadMs: number;
}

export class Generation {
  readonly #remote: RemoteEngine;
  readonly #text: TextPool;
  readonly #metrics: RequestMetrics;
  readonly #logger: Logger;
  readonly #maxRunning: number;
  readonly #unreadMs: number;
  readonly #aborts = new Set<AbortController>();
  #running = 0;
  #finished = 0;
  #lastEventMs = performance.now();

  constructor(options: GenerationOptions) {
    this.#remote = options.remote;
    this.#text = options.text;
    this.#metrics = options.metrics;
    this.#logger = options.logger;
    this.#maxRunning = options.maxRunning;
    this.#unreadMs = options.unreadMs;
  }

  /** For /health. `silentMs`: since the last sign of life of any answer; 0 while none runs. */
  get progress(): { readonly running: number; readonly finished: number; readonly silentMs: number } {
    const silentMs = this.#running === 0 ? 0 : Math.round(performance.now() - this.#lastEventMs);
    return { running: this.#running, finished: this.#finished, silentMs };
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
    const model = this.#remote.model();
    const abort = new AbortController();
    const gone = new KvError('CANCELLED', 'the client ended the request');
    const onClose = (): void => abort.abort(gone); // also after a complete answer, then of no effect
    reply.raw.once('close', onClose);
    if (reply.raw.destroyed) onClose();
    this.#aborts.add(abort);
    try {
      const { params, prompts, echoes } = await bodyOf(request).use((bytes) =>
        this.#text.run(endpoint, model.text, bytes, abort.signal),
      );
      // Unique, unlike x-request-id, which a client may choose: the engine tells its requests apart by it.
      const requestId = randomUUID();
      const job: Job = {
        endpoint,
        plan: { requestId, model, prompts, params },
        head: {
          id: `${endpoint === 'chat' ? 'chatcmpl' : 'cmpl'}-${requestId}`,
          created: Math.floor(Date.now() / 1000),
          model: model.description.model,
        },
        defaultMaxTokens: endpoint === 'chat' ? Number.POSITIVE_INFINITY : completionMaxTokens,
        echoes: echoes.flatMap((echo) => Array<string>(params.n).fill(echo)),
        arrivedMs,
        signal: abort.signal,
      };
      const count = job.echoes.length;
      this.#begin(count);
      try {
        return await (params.stream ? this.#stream(job, reply) : this.#collect(job));
      } finally {
        this.#end(count);
      }
    } finally {
      reply.raw.off('close', onClose);
      this.#aborts.delete(abort);
    }
  }

  async #collect(job: Job): Promise<unknown> {
    const { returnTokenIds } = job.plan.params;
    const answers = job.echoes.map(
      (text): Answer => ({ text, tokenIds: returnTokenIds ? [] : undefined, finishReason: null }),
    );
    const totals = await this.#run(job, ({ index, text, tokenIds, finishReason }) => {
      answers[index]!.text += text;
      answers[index]!.tokenIds?.push(...tokenIds);
      answers[index]!.finishReason = finishReason;
    });
    return wholeReply(job.endpoint, job.head, answers, totals);
  }

  async #stream(job: Job, reply: FastifyReply): Promise<unknown> {
    const { endpoint, head, plan } = job;
    const { includeUsage, returnTokenIds } = plan.params;
    let events: EventStream | undefined;
    let open = job.echoes.length; // answers without a finish reason yet
    let last: object | undefined;
    const onDelta = async (delta: Delta): Promise<void> => {
      if (!events) {
        reply.hijack();
        events = new EventStream(reply.raw, reply.request.id, this.#unreadMs);
      }
      const text = delta.first ? job.echoes[delta.index]! + delta.text : delta.text;
      const chunks: object[] = chunksOf(endpoint, head, { ...delta, text }, returnTokenIds);
      if (delta.finishReason !== null && --open === 0) last = chunks.pop(); // it goes out with the totals
      for (const chunk of chunks) await events.send(includeUsage ? { ...chunk, usage: null } : chunk);
    };
    try {
      const totals = await this.#run(job, onDelta);
      if (!events) throw new KvError('PROTOCOL', 'engine: finished without an answer; see its log');
      await events.send(includeUsage ? { ...last, usage: null } : { ...last, kvtier: kvtierOf(totals) });
      if (includeUsage) await events.send(usageChunk(endpoint, head, totals));
      events.end();
    } catch (error) {
      if (!events) throw error;
      // The status is out already: the client learns from an event.
      const failure = toHttpError(error);
      const level = failure.status === 499 ? 'debug' : 'warn';
      this.#logger[level]({ request: plan.requestId }, `stream ended: ${failure.message}`);
      events.fail(failure.body);
    }
    return reply;
  }

  async #run(job: Job, onDelta: (delta: Delta) => void | Promise<void>): Promise<Totals> {
    let first = true;
    const totals = await runAnswers(this.#remote, job.plan, job.defaultMaxTokens, job.signal, (delta) => {
      this.#lastEventMs = performance.now();
      if (first) this.#metrics.firstTokenSeconds.observe((this.#lastEventMs - job.arrivedMs) / 1000);
      first = false;
      return onDelta(delta);
    });
    this.#metrics.requestSeconds.observe((performance.now() - job.arrivedMs) / 1000);
    this.#metrics.countTokens(totals);
    return totals;
  }

  /** @throws KvError BUSY */
  #begin(count: number): void {
    if (this.#running + count > this.#maxRunning) {
      throw new KvError(
        'BUSY',
        `the API server: ${this.#running} answers are being generated already; try again later`,
      );
    }
    if (this.#running === 0) this.#lastEventMs = performance.now();
    this.#running += count;
    this.#metrics.running.set(this.#running);
  }

  #end(count: number): void {
    this.#running -= count;
    this.#finished += count;
    this.#metrics.running.set(this.#running);
  }
}
