/**
 * One log line a request, when the configuration asks for it (`logRequests`): what became of it and where its time went, under the id that
 * the coordinator's line names it by and the client's own trace. Nothing of prompts and answers.
 */
import type { Output } from '@kvtier/scheduler';
import { type Logger, traceparentOf } from '@kvtier/telemetry';
import type { GenerateRequest } from '@kvtier/wire/grpc';

/** Of an id, which comes from outside. */
const mostIdChars = 256;

export interface RequestLine {
  told(output: Output): void;
  /** Once. */
  over(outcome: string): void;
}

/** `logger` undefined: no lines. */
export function requestLine(request: GenerateRequest, logger: Logger | undefined): RequestLine {
  if (logger === undefined) return noLine;
  const arrivedMs = performance.now();
  const sinceMs = (): number => Math.round(performance.now() - arrivedMs);
  let tokens = 0;
  let firstTokenMs: number | undefined;
  let cache: Output['cache'];
  return {
    told: (output) => {
      tokens += output.tokenIds.length;
      if (tokens > 0) firstTokenMs ??= sinceMs();
      cache ??= output.cache;
    },
    over: (outcome) => {
      const { prefillOnly, handOff, promptTokenIds } = request;
      logger.info(
        {
          request: request.requestId.slice(0, mostIdChars),
          traceparent: traceparentOf(request.traceparent),
          part: prefillOnly ? 'prefill' : handOff ? 'decode' : undefined,
          ...{ outcome, promptTokens: promptTokenIds.length, tokens },
          ...(cache && {
            ...{ cachedTokens: cache.cachedTokens, tokensByTier: cache.tokensByTier },
            ...{ queueMs: ms(cache.queueUs), loadMs: ms(cache.loadUs), prefillMs: ms(cache.prefillUs) },
          }),
          ...{ firstTokenMs, ms: sinceMs() },
        },
        'request',
      );
    },
  };
}

const ms = (us: number): number => Math.round(us / 1_000);
const noLine: RequestLine = { told: () => {}, over: () => {} };
