/**
 * One log line a request, when the configuration asks for it (`logRequests`): who had it, why, what was predicted and what was seen, under
 * the client's own names for it. Nothing of prompts and answers.
 */
import { type Logger, traceparentOf } from '@kvtier/telemetry';
import type { FastifyReply, FastifyRequest } from 'fastify';
import { endedAs } from './cut-answers.ts';
import type { Placed } from './placed.ts';

/** What is known of a request by its end; filled in as it comes to be known. */
export interface RequestTrace {
  /** As workers know it; it is read again at most a few times, each under another one. */
  requestId?: string;
  model?: string;
  placed?: Placed;
  /** performance.now() of its first token. */
  firstTokenAtMs?: number;
  /** What its client was told instead of an answer. */
  failure?: string;
}

/** The answer's connection tells the end: whatever became of it, there is one line. */
export function traceRequest(
  request: FastifyRequest,
  reply: FastifyReply,
  arrivedMs: number,
  logger: Logger,
): RequestTrace {
  const trace: RequestTrace = {};
  const { raw } = reply;
  raw.once('close', () => {
    const { requestId, model, placed, firstTokenAtMs, failure } = trace;
    const traceparent = traceparentOf(request.headers.traceparent);
    const predictedS = placed?.predictedS;
    logger.info(
      {
        ...{ request: request.id, workerRequest: requestId, traceparent, route: request.routeOptions.url, model },
        status: endedAs(raw),
        ...Object.fromEntries(
          Object.entries(placed?.headers() ?? {}).map(([name, value]) => [name.replace('x-kvtier-', ''), value]),
        ),
        predictedFirstTokenMs: predictedS === undefined ? undefined : Math.round(predictedS * 1_000),
        firstTokenMs: firstTokenAtMs === undefined ? undefined : Math.round(firstTokenAtMs - arrivedMs),
        ms: Math.round(performance.now() - arrivedMs),
        failure,
      },
      'request',
    );
  });
  return trace;
}
