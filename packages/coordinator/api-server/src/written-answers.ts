/**
 * How the answers of a request are written to its client: as one JSON, or as server-sent events.
 *
 * Invariant: before the first text of any answer nothing is written, and what fails is thrown; after it, a stream ends with an event.
 */
import { KvError } from '@kvtier/errors';
import type { Logger } from '@kvtier/telemetry';
import type { FastifyReply } from 'fastify';
import { markCut } from './cut-answers.ts';
import { toHttpError } from './errors.ts';
import type { Placed } from './placed.ts';
import type { Delta, Plan, Totals } from './plan.ts';
import {
  type Answer,
  chunksOf,
  type Endpoint,
  kvtierOf,
  PlainChunks,
  type ReplyHead,
  usageChunk,
  wholeReply,
} from './replies.ts';
import { EventStream } from './sse.ts';

/** Of a chunk that takes a turn for itself: half a millisecond to write. */
const largeChars = 1 << 16;

/** Of a request, what its answers are written by. */
export interface Written {
  readonly endpoint: Endpoint;
  readonly plan: Plan;
  readonly head: ReplyHead;
  readonly placed: Placed;
  /** Text that each answer starts with (`echo`). */
  readonly echoes: readonly string[];
}

export type OnDelta = (delta: Delta) => void | Promise<void>;
/** Runs the answers to their end, piece by piece. */
export type Generate = (onDelta: OnDelta) => Promise<Totals>;

export interface StreamOptions {
  readonly logger: Logger;
  /** A client that takes nothing of its stream for so long is cut off. */
  readonly unreadMs: number;
  /** A client has taken what waited for it. */
  readonly taken: () => void;
}

export async function collect(job: Written, reply: FastifyReply, generate: Generate): Promise<unknown> {
  const { returnTokenIds } = job.plan.params;
  const answers = job.echoes.map(
    (text): Answer => ({ text, tokenIds: returnTokenIds ? [] : undefined, finishReason: null }),
  );
  const totals = await generate(({ index, text, tokenIds, finishReason }) => {
    answers[index]!.text += text;
    answers[index]!.tokenIds?.push(...tokenIds);
    answers[index]!.finishReason = finishReason;
  });
  void reply.headers(job.placed.headers());
  return wholeReply(job.endpoint, job.head, answers, totals);
}

export async function stream(
  { endpoint, head, plan, placed, echoes }: Written,
  reply: FastifyReply,
  generate: Generate,
  { logger, unreadMs, taken }: StreamOptions,
): Promise<unknown> {
  const { includeUsage, returnTokenIds } = plan.params;
  let events: EventStream | undefined;
  let open = echoes.length; // answers without a finish reason yet
  let last: object | undefined;
  const plain: PlainChunks[] = [];
  const onDelta = (delta: Delta): void | Promise<void> => {
    if (!events) {
      reply.hijack();
      events = new EventStream(reply.raw, reply.request.id, { unreadMs, taken, headers: placed.headers() });
    }
    if (!delta.first && delta.finishReason === null && delta.text.length <= largeChars) {
      const { index } = delta;
      plain[index] ??= new PlainChunks(endpoint, head, index, includeUsage, returnTokenIds);
      const json = plain[index].of(delta);
      return json === undefined ? undefined : events.sendText(json);
    }
    const text = delta.first ? echoes[delta.index]! + delta.text : delta.text;
    const chunks: object[] = chunksOf(endpoint, head, { ...delta, text }, returnTokenIds);
    if (delta.finishReason !== null && --open === 0) last = chunks.pop(); // it goes out with the totals
    const sent = includeUsage ? chunks.map((chunk) => ({ ...chunk, usage: null })) : chunks;
    return text.length > largeChars ? events.sendInTurn(sent) : events.send(sent);
  };
  try {
    const totals = await generate(onDelta);
    if (!events) throw new KvError('PROTOCOL', 'engine: finished without an answer; see its log');
    if (includeUsage) await events.end([{ ...last, usage: null }, usageChunk(endpoint, head, totals)]);
    else await events.end([{ ...last, kvtier: kvtierOf(totals) }]);
  } catch (error) {
    if (!events) throw error;
    // The status is out already: the client learns from an event.
    const failure = toHttpError(error);
    const level = failure.status === 499 ? 'debug' : 'warn';
    if (failure.status !== 499) markCut(reply.raw);
    logger[level]({ request: plan.requestId }, `stream ended: ${failure.message}`);
    await events.fail(failure.body);
  }
  return reply;
}
