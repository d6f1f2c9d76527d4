/**
 * The gRPC service `Engine` over the scheduler: requests in, tokens out, errors as KvFailure.
 *
 * Invariants: each call ends exactly once, with a finish reason or a failure; a call that its client cancelled aborts
 * its request, at whatever moment, so that its blocks are free again. Nothing a client sends throws in here.
 */
import { KvError } from '@kvtier/errors';
import type { Engine } from '@kvtier/scheduler';
import type { Logger } from '@kvtier/telemetry';
import { type Description, type EngineServer, unary } from '@kvtier/wire/grpc';
import { Generations } from './generations.ts';
import type { LoadWatches } from './load-watches.ts';
import type { WorkerMetrics } from './metrics.ts';
import type { PrefixPrefetches } from './prefix-prefetches.ts';
import type { SharedCalls } from './shared-calls.ts';

const maxPinNameChars = 256;

/**
 * Of the server: what a client has of an engine, it has while its calls live. One that stands still is noticed, and its calls end,
 * within two seconds. (One that dies is noticed at once: its kernel closes the connection.)
 */
export const liveness = { 'grpc.keepalive_time_ms': 500, 'grpc.keepalive_timeout_ms': 1_400 };

export interface EngineServiceOptions {
  readonly engine: Pick<
    Engine,
    'submit' | 'abort' | 'changeHandOff' | 'tellFirstToken' | 'drain' | 'resetPrefixCache' | 'pinPrefix' | 'unpinPrefix'
  >;
  readonly describe: () => Description;
  readonly metrics: WorkerMetrics;
  readonly watches: LoadWatches;
  readonly prefetches: Pick<PrefixPrefetches, 'begin'>;
  readonly shared: SharedCalls;
  /** Gets a line for each request. */
  readonly requestLogger?: Logger | undefined;
}

export function engineService(options: EngineServiceOptions): EngineServer {
  const { engine, describe, metrics, watches, prefetches, shared } = options;
  const generations = new Generations(options);
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
    changeHandOff: unary(({ requestId, blocks }) => ({ done: generations.changeHandOff(requestId, blocks) })),
    tellFirstToken: unary(({ requestId, tokenId }) => ({ done: generations.tellFirstToken(requestId, tokenId) })),
    generate: (call) => {
      const abort = generations.begin(call.request, (event, isLast) => {
        call.write(event);
        if (isLast) call.end();
      });
      call.on('cancelled', abort);
    },
    generateMany: (call) => shared.add(call, generations),
  };
}
