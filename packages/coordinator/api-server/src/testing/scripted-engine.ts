/**
 * A gRPC server that implements Engine by a script: the API server's tests say what the engine answers and see what it was
 * asked. It computes nothing; everything between it and the client of the API server is the real thing.
 */
import type { ServerWritableStream } from '@grpc/grpc-js';
import type { KvError } from '@kvtier/errors';
import {
  type CacheUse,
  type Description,
  EngineService,
  type GenerateEvent,
  type GenerateRequest,
  type PinPrefixRequest,
  type RunningGrpcServer,
  startGrpcServer,
  toFailure,
  unary,
} from '@kvtier/wire/grpc';

export type Call = ServerWritableStream<GenerateRequest, GenerateEvent>;

export interface Seen {
  readonly request: GenerateRequest;
  /** Resolves when the API server cancelled the call. */
  readonly cancelled: Promise<void>;
}

export class ScriptedEngine {
  readonly seen: Seen[] = [];
  description: Description;
  /** What a call does. */
  script: (call: Call, request: GenerateRequest) => void | Promise<void> = () => {};
  prometheus = '# TYPE kvtier_engine_steps_total counter\nkvtier_engine_steps_total 7\n';
  resets = 0;
  readonly pins: PinPrefixRequest[] = [];
  pinRefusal: KvError | undefined;
  #server: RunningGrpcServer | undefined;
  readonly #address: string;

  constructor(address: string, modelDir: string) {
    this.#address = address;
    this.description = {
      model: 'demo',
      modelDir,
      maxModelTokens: 4_096,
      blockTokens: 16,
      vocabSize: 3_520,
      stopTokenIds: [2],
      backend: 'cpu',
      tierAttached: true,
      blockCount: 100n,
      blockBytes: 16_384n,
    };
  }

  async start(): Promise<void> {
    this.#server = await startGrpcServer(this.#address, (server) =>
      server.addService(EngineService, {
        describe: unary(() => this.description),
        metrics: unary(() => ({ prometheus: this.prometheus })),
        pinPrefix: unary((request) => {
          if (this.pinRefusal) throw this.pinRefusal;
          this.pins.push(request);
          return { pinnedTokens: request.promptTokenIds.length };
        }),
        unpinPrefix: unary(({ name }) => {
          const kept = this.pins.filter((pin) => pin.name !== name);
          const done = kept.length < this.pins.length;
          this.pins.splice(0, this.pins.length, ...kept);
          return { done };
        }),
        resetPrefixCache: unary(() => ({ done: ++this.resets === 1 })),
        generate: (call: Call) => {
          const cancelled = new Promise<void>((resolve) => call.on('cancelled', () => resolve()));
          this.seen.push({ request: call.request, cancelled });
          void this.script(call, call.request);
        },
      }),
    );
  }

  /** Cuts running calls, as a killed worker does. */
  async stop(): Promise<void> {
    await this.#server?.close(0);
  }
}

export const cacheUse = (part: Partial<CacheUse> = {}): CacheUse => ({
  promptTokens: 0,
  cachedTokens: 0,
  tokensByTier: {},
  queueUs: 0,
  loadUs: 0,
  prefillUs: 0,
  ...part,
});

export const event = (part: Partial<GenerateEvent>): GenerateEvent => ({
  tokenIds: [],
  finishReason: '',
  failure: undefined,
  ...part,
});

/** A greedy request, as the API server makes it of one that says nothing else. */
export const greedy = (part: Partial<GenerateRequest>): GenerateRequest => ({
  requestId: '',
  promptTokenIds: [],
  maxTokens: 16,
  temperature: 0,
  topK: 0,
  topP: 1,
  seed: undefined,
  ignoreEos: false,
  stopTokenIds: [],
  cacheSalt: '',
  loraName: '',
  ...part,
});

/** Answers with `ids`, one event each, ended by `finishReason` with the last one. */
export const say =
  (ids: readonly number[], finishReason: 'stop' | 'length' = 'stop', cache: CacheUse = cacheUse()) =>
  (call: Call): void => {
    ids.forEach((id, at) => {
      const last = at === ids.length - 1;
      call.write(event({ tokenIds: [id], finishReason: last ? finishReason : '', ...(at === 0 ? { cache } : {}) }));
    });
    call.end();
  };

export const fail =
  (error: KvError) =>
  (call: Call): void => {
    call.write(event({ failure: toFailure(error) }));
    call.end();
  };
