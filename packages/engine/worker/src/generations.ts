/**
 * Requests of clients at the scheduler: each begun, told of, and over exactly once, whichever call it came by.
 *
 * Invariant: after the last event, or after `abort`, nothing more is told, and the request's blocks are free again.
 */
import type { CacheUse, Engine, Output, GenerateRequest as ScheduledRequest } from '@kvtier/scheduler';
import type { Logger } from '@kvtier/telemetry';
import { type GenerateEvent, type GenerateRequest, toFailure } from '@kvtier/wire/grpc';
import type { LoadWatches } from './load-watches.ts';
import type { WorkerMetrics } from './metrics.ts';
import { requestLine } from './request-log.ts';

export interface GenerationsOptions {
  readonly engine: Pick<Engine, 'submit' | 'abort' | 'changeHandOff' | 'tellFirstToken'>;
  readonly metrics: WorkerMetrics;
  readonly watches: LoadWatches;
  /** Gets a line for each request. */
  readonly requestLogger?: Logger | undefined;
}

/** Must not throw. */
export type TellEvent = (event: GenerateEvent, isLast: boolean) => void;

export class Generations {
  readonly #options: GenerationsOptions;
  #begun = 0;
  /** By the client's name, the open request that bears it; of several the last. */
  readonly #handOffs = new Map<string, string>();

  constructor(options: GenerationsOptions) {
    this.#options = options;
  }

  /** False: nothing waits for blocks under this id any more. */
  changeHandOff(requestId: string, blocks: number): boolean {
    const ours = this.#handOffs.get(requestId);
    return ours !== undefined && this.#options.engine.changeHandOff(ours, blocks);
  }

  /** False: the request draws its first token itself. @throws KvError REQUEST: there is no such token */
  tellFirstToken(requestId: string, tokenId: number): boolean {
    const ours = this.#handOffs.get(requestId);
    return ours !== undefined && this.#options.engine.tellFirstToken(ours, tokenId);
  }

  /** Also what is refused is told, before this returns. Returns how it is aborted, which does nothing once it is over. */
  begin(request: GenerateRequest, tell: TellEvent): () => void {
    const { engine, metrics, watches } = this.#options;
    const arrivedAtMs = performance.now();
    const { sender, sentNumber } = request;
    // Two clients may choose the same name: what the scheduler sees is ours.
    const requestId = `${request.requestId}@${this.#begun++}`;
    const line = requestLine(request, this.#options.requestLogger);
    let ended = false;
    /** performance.now() of its last token. undefined: it has none yet. */
    let toldAtMs: number | undefined;
    const end = (outcome: string): void => {
      ended = true;
      if (this.#handOffs.get(request.requestId) === requestId) this.#handOffs.delete(request.requestId);
      if (sender !== undefined && sentNumber !== undefined) watches.over(sender, sentNumber);
      metrics.observeEnd(outcome);
      line.over(outcome);
    };
    const onOutput = (output: Output): void => {
      if (ended) return;
      line.told(output);
      const { tokenIds, finishReason, cache, handOff, error } = output;
      if (error) {
        end(error.code);
        tell(event({ failure: toFailure(error) }), true);
        return;
      }
      // What is drawn for another worker's answer is no stream here, and that worker counts its tokens; none does where it is the whole
      // answer ('prefilled' brings no token).
      if (!request.prefillOnly || finishReason !== '') metrics.observeTokens(tokenIds.length);
      if (tokenIds.length > 0 && !request.prefillOnly) {
        const nowMs = performance.now();
        if (toldAtMs !== undefined) metrics.observePause(nowMs - toldAtMs);
        else if (sender !== undefined && sentNumber !== undefined) watches.begun(sender, sentNumber);
        toldAtMs = nowMs;
      }
      // Of what is computed for another worker, users feel nothing here.
      if (cache && !request.prefillOnly) metrics.observeFirstToken((performance.now() - arrivedAtMs) * 1_000, cache);
      const fields = {
        ...{ tokenIds: [...tokenIds], finishReason },
        ...(cache && { cache: wireCacheUse(cache) }),
        ...(handOff && { handOff: { ...handOff } }),
      };
      if (finishReason !== '') end(finishReason);
      tell(event(fields), finishReason !== '');
    };
    try {
      if (request.handOff) this.#handOffs.set(request.requestId, requestId);
      engine.submit(scheduled(requestId, request), onOutput);
      if (!ended && sender !== undefined && sentNumber !== undefined) watches.taken(sender, sentNumber);
    } catch (error) {
      const failure = toFailure(error);
      if (!ended) {
        end(failure.code);
        tell(event({ failure }), true);
      }
    }
    return () => {
      if (ended) return;
      end('CANCELLED');
      engine.abort(requestId);
    };
  }
}

const event = (fields: Partial<GenerateEvent>): GenerateEvent => ({
  tokenIds: [],
  finishReason: '',
  cache: undefined,
  failure: undefined,
  ...fields,
});

/** One that does not fit would end the call of all requests. 2^32 µs are 72 minutes: in a queue, or for a long prompt on a slow machine. */
const wireUs = (us: number): number => Math.min(Math.round(us), 2 ** 32 - 1);

const wireCacheUse = (use: CacheUse): NonNullable<GenerateEvent['cache']> => ({
  promptTokens: use.promptTokens,
  cachedTokens: use.cachedTokens,
  tokensByTier: { ...use.tokensByTier },
  queueUs: wireUs(use.queueUs),
  loadUs: wireUs(use.loadUs),
  prefillUs: wireUs(use.prefillUs),
  ...(use.handedTokens !== undefined && {
    handedTokens: use.handedTokens,
    handOffUs: wireUs(use.handOffUs!),
    tailUs: wireUs(use.tailUs!),
  }),
});

/** What a client sent, as the scheduler takes it; it checks the values. */
const scheduled = (
  requestId: string,
  { sender: _sender, sentNumber: _sentNumber, traceparent: _traceparent, promptTokenIds, ...request }: GenerateRequest,
): ScheduledRequest => ({ ...request, requestId, promptTokenIds: typed(promptTokenIds) });

/** A long prompt came as such (`decodeOrder`). */
const typed = (ids: readonly number[] | Uint32Array): Uint32Array =>
  ids instanceof Uint32Array ? ids : new Uint32Array(ids);
