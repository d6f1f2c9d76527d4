/**
 * The gRPC service `Engine` over the scheduler: requests in, tokens out, errors as KvFailure.
 *
 * Invariants: each call ends exactly once, with a finish reason or a failure; a call that its client cancelled aborts
 * its request, at whatever moment, so that its blocks are free again. Nothing a client sends throws in here.
 */
import { KvError } from '@kvtier/errors';
import type { CacheUse, Engine, Output, GenerateRequest as ScheduledRequest } from '@kvtier/scheduler';
import {
  type Description,
  type EngineServer,
  type GenerateEvent,
  type GenerateRequest,
  toFailure,
  unary,
} from '@kvtier/wire/grpc';
import type { LoadWatches } from './load-watches.ts';
import type { WorkerMetrics } from './metrics.ts';
import type { PrefixPrefetches } from './prefix-prefetches.ts';

const maxPinNameChars = 256;

/**
 * Of the server: what a client has of an engine, it has while its calls live. One that stands still is noticed, and its calls end,
 * within two seconds. (One that dies is noticed at once: its kernel closes the connection.)
 */
export const liveness = { 'grpc.keepalive_time_ms': 500, 'grpc.keepalive_timeout_ms': 1_400 };

export interface EngineServiceOptions {
  readonly engine: Pick<
    Engine,
    'submit' | 'abort' | 'changeHandOff' | 'drain' | 'resetPrefixCache' | 'pinPrefix' | 'unpinPrefix'
  >;
  readonly describe: () => Description;
  readonly metrics: WorkerMetrics;
  readonly watches: LoadWatches;
  readonly prefetches: Pick<PrefixPrefetches, 'begin'>;
}

export function engineService({ engine, describe, metrics, watches, prefetches }: EngineServiceOptions): EngineServer {
  let calls = 0;
  /** By the client's name, the open call that bears it; of several the last. */
  const handOffs = new Map<string, string>();
  return {
    describe: unary(describe),
    resetPrefixCache: unary(() => ({ done: engine.resetPrefixCache() })),
    pinPrefix: unary(({ name, promptTokenIds, cacheSalt }) => {
      if (name === '' || name.length > maxPinNameChars) {
        throw new KvError('REQUEST', `pin: a name of ${name.length} characters; give 1 to ${maxPinNameChars}`);
      }
      return { pinnedTokens: engine.pinPrefix(name, Uint32Array.from(promptTokenIds), cacheSalt) };
    }),
    unpinPrefix: unary(({ name }) => ({ done: engine.unpinPrefix(name) })),
    prefetch: unary((request) => ({ blocks: prefetches.begin(request) })),
    metrics: unary(async () => ({ prometheus: await metrics.text() })),
    watchLoad: (call) => watches.add(call),
    drain: unary(() => ({ left: engine.drain() })),
    changeHandOff: unary(({ requestId, blocks }) => {
      const ours = handOffs.get(requestId);
      return { done: ours !== undefined && engine.changeHandOff(ours, blocks) };
    }),
    generate: (call) => {
      const arrivedAtMs = performance.now();
      const { sender, sentNumber } = call.request;
      // Two clients may choose the same name: what the scheduler sees is ours.
      const requestId = `${call.request.requestId}@${calls++}`;
      let ended = false;
      const over = (): void => {
        if (handOffs.get(call.request.requestId) === requestId) handOffs.delete(call.request.requestId);
        if (sender !== undefined && sentNumber !== undefined) watches.over(sender, sentNumber);
      };
      const end = (outcome: string, last: GenerateEvent): void => {
        ended = true;
        over();
        metrics.observeEnd(outcome);
        call.write(last);
        call.end();
      };
      const onOutput = (output: Output): void => {
        if (ended) return;
        const { tokenIds, finishReason, cache, handOff, error } = output;
        if (error) {
          end(error.code, event({ failure: toFailure(error) }));
          return;
        }
        metrics.observeTokens(tokenIds.length);
        // Of what is computed for another worker, users feel nothing here.
        if (cache && finishReason !== 'prefilled')
          metrics.observeFirstToken((performance.now() - arrivedAtMs) * 1_000, cache);
        const fields = {
          ...{ tokenIds: [...tokenIds], finishReason },
          ...(cache && { cache: wireCacheUse(cache) }),
          ...(handOff && { handOff: { ...handOff } }),
        };
        if (finishReason === '') call.write(event(fields));
        else end(finishReason, event(fields));
      };
      call.on('cancelled', () => {
        if (ended) return;
        ended = true;
        over();
        metrics.observeEnd('CANCELLED');
        engine.abort(requestId);
      });
      try {
        if (call.request.handOff) handOffs.set(call.request.requestId, requestId);
        engine.submit(scheduled(requestId, call.request), onOutput);
        if (!ended && sender !== undefined && sentNumber !== undefined) watches.taken(sender, sentNumber);
      } catch (error) {
        const failure = toFailure(error);
        if (!ended) end(failure.code, event({ failure }));
      }
    },
  };
}

const event = (fields: Partial<GenerateEvent>): GenerateEvent => ({
  tokenIds: [],
  finishReason: '',
  cache: undefined,
  failure: undefined,
  ...fields,
});

const wireCacheUse = (use: CacheUse): NonNullable<GenerateEvent['cache']> => ({
  promptTokens: use.promptTokens,
  cachedTokens: use.cachedTokens,
  tokensByTier: { ...use.tokensByTier },
  queueUs: Math.round(use.queueUs),
  loadUs: Math.round(use.loadUs),
  prefillUs: Math.round(use.prefillUs),
  ...(use.handedTokens !== undefined && {
    handedTokens: use.handedTokens,
    handOffUs: Math.round(use.handOffUs!),
    tailUs: Math.round(use.tailUs!),
  }),
});

/** What a client sent, as the scheduler takes it; it checks the values. */
const scheduled = (
  requestId: string,
  { sender: _sender, sentNumber: _sentNumber, ...request }: GenerateRequest,
): ScheduledRequest => ({
  ...request,
  requestId,
  promptTokenIds: Uint32Array.from(request.promptTokenIds),
});
