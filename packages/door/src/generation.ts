/**
 * POST /v1/completions and /v1/chat/completions: from a body to an answer, whole or streamed.
 *
 *   body ─► parameters ─► model ─► token ids ─► answers at the engine ─► JSON, or server-sent events
 *
 * Invariants: until the first token nothing is written, so every failure before it has its HTTP status. A client that
 * leaves, at any moment, ends its calls at the engine. Answers running at once are bounded.
 */
import { randomUUID } from 'node:crypto';
import { setImmediate } from 'node:timers/promises';
import { KvError } from '@kvtier/errors';
import type { Logger } from '@kvtier/telemetry';
import type { FastifyReply, FastifyRequest } from 'fastify';
import { type Delta, type Plan, promptText, promptTokens, runAnswers, type Totals } from './answers.ts';
import type { EngineLink, Model } from './engine-link.ts';
import { HttpError, toHttpError } from './errors.ts';
import type { DoorMetrics } from './metrics.ts';
import { type GenerationParams, type Prompt, parseChat, parseCompletion } from './params.ts';
import { type Answer, chunksOf, type Endpoint, kvtierOf, type ReplyHead, usageChunk, wholeReply } from './replies.ts';
import { EventStream } from './sse.ts';

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
  readonly link: EngineLink;
  readonly metrics: DoorMetrics;
  readonly logger: Logger;
  /** Answers generated at once, of all requests; more are refused with 429. */
  readonly maxRunning: number;
}

export class Generation {
  readonly #link: EngineLink;
  readonly #metrics: DoorMetrics;
  readonly #logger: Logger;
  readonly #maxRunning: number;
  readonly #aborts = new Set<AbortController>();
  #running = 0;
  #finished = 0;
  #lastEventMs = performance.now();

  constructor(options: GenerationOptions) {
    this.#link = options.link;
    this.#metrics = options.metrics;
    this.#logger = options.logger;
    this.#maxRunning = options.maxRunning;
  }

  /** For /health. `silentMs`: since the last sign of life of any answer; 0 while none runs. */
  get progress(): { readonly running: number; readonly finished: number; readonly silentMs: number } {
    const silentMs = this.#running === 0 ? 0 : Math.round(performance.now() - this.#lastEventMs);
    return { running: this.#running, finished: this.#finished, silentMs };
  }

  /** Ends every running request. */
  abortAll(): void {
    const reason = new KvError('DISCONNECTED', 'the door is closing; try again', { retry: true });
    for (const abort of this.#aborts) abort.abort(reason);
  }

  async completions(request: FastifyRequest, reply: FastifyReply): Promise<unknown> {
    const params = parseCompletion(request.body);
    return this.#answer('completion', request, reply, params, params.prompts, params.echo);
  }

  async chat(request: FastifyRequest, reply: FastifyReply): Promise<unknown> {
    const params = parseChat(request.body);
    const prompt = this.#model(params.model).tokenizer.chatPrompt(params.messages);
    return this.#answer('chat', request, reply, params, [prompt], false);
  }

  /** @throws HttpError 404 for another model than the one served, KvError when there is none at the moment */
  #model(name: string | undefined): Model {
    const model = this.#link.model();
    if (name !== undefined && name !== model.description.model) throw unknownModel(name);
    return model;
  }

  async #answer(
    endpoint: Endpoint,
    _request: FastifyRequest,
    reply: FastifyReply,
    params: GenerationParams,
    prompts: readonly Prompt[],
    echo: boolean,
  ): Promise<unknown> {
    const arrivedMs = performance.now();
    const model = this.#model(params.model);
    const tokens: (readonly number[])[] = [];
    for (const prompt of prompts) {
      tokens.push(promptTokens(prompt, model, params, endpoint === 'completion'));
      if (prompts.length > 1) await setImmediate(); // others have their turn between two long prompts
    }
    const count = prompts.length * params.n;
    if (this.#running + count > this.#maxRunning) {
      throw new KvError('BUSY', `the door: ${this.#running} answers are being generated already; try again later`);
    }
    const abort = new AbortController();
    const gone = new KvError('CANCELLED', 'the client ended the request');
    const onClose = (): void => abort.abort(gone); // also after a complete answer, then of no effect
    reply.raw.once('close', onClose);
    if (reply.raw.destroyed) onClose();
    // Unique, unlike x-request-id, which a client may choose: the engine tells its requests apart by it.
    const requestId = randomUUID();
    const job: Job = {
      endpoint,
      plan: { requestId, model, prompts: tokens, params },
      head: {
        id: `${endpoint === 'chat' ? 'chatcmpl' : 'cmpl'}-${requestId}`,
        created: Math.floor(Date.now() / 1000),
        model: model.description.model,
      },
      defaultMaxTokens: endpoint === 'chat' ? Number.POSITIVE_INFINITY : completionMaxTokens,
      echoes: prompts.flatMap((prompt) =>
        Array<string>(params.n).fill(echo ? promptText(prompt, model.tokenizer) : ''),
      ),
      arrivedMs,
      signal: abort.signal,
    };
    this.#begin(count, abort);
    try {
      return await (params.stream ? this.#stream(job, reply) : this.#collect(job));
    } finally {
      reply.raw.off('close', onClose);
      this.#end(count, abort);
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
        events = new EventStream(reply.raw, reply.request.id);
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
    const totals = await runAnswers(this.#link, job.plan, job.defaultMaxTokens, job.signal, (delta) => {
      this.#lastEventMs = performance.now();
      if (first) this.#metrics.firstTokenSeconds.observe((this.#lastEventMs - job.arrivedMs) / 1000);
      first = false;
      return onDelta(delta);
    });
    this.#metrics.requestSeconds.observe((performance.now() - job.arrivedMs) / 1000);
    this.#metrics.countTokens(totals);
    return totals;
  }

  #begin(count: number, abort: AbortController): void {
    if (this.#running === 0) this.#lastEventMs = performance.now();
    this.#running += count;
    this.#metrics.running.set(this.#running);
    this.#aborts.add(abort);
  }

  #end(count: number, abort: AbortController): void {
    this.#running -= count;
    this.#finished += count;
    this.#metrics.running.set(this.#running);
    this.#aborts.delete(abort);
  }
}

export const unknownModel = (name: string): HttpError =>
  new HttpError(404, `The model '${name}' does not exist; GET /v1/models lists what is served.`, {
    param: 'model',
    code: 'model_not_found',
  });
