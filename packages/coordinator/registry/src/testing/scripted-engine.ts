/**
 * A gRPC server that implements Engine by a script: tests of the coordinator say what the engine answers and see what it was
 * asked. It computes nothing; everything between it and the coordinator's client is the real thing.
 */
import { randomBytes } from 'node:crypto';
import { EventEmitter } from 'node:events';
import type { ServerDuplexStream, ServerWritableStream } from '@grpc/grpc-js';
import type { KvError } from '@kvtier/errors';
import {
  type CacheUse,
  type ChangeHandOffRequest,
  type Description,
  type EngineLoad,
  EngineService,
  type GenerateEvent,
  type GenerateEvents,
  type GenerateOrder,
  type GenerateRequest,
  type PinPrefixRequest,
  type PrefetchRequest,
  type RunningGrpcServer,
  startGrpcServer,
  type TellFirstTokenRequest,
  toFailure,
  unary,
  type WatchLoadRequest,
} from '@kvtier/wire/grpc';

/** Between two signs of life. */
const lifeMs = 250;

export type Watch = ServerWritableStream<WatchLoadRequest, EngineLoad>;
/** A request, by whichever way it came. */
export type Call = Pick<
  ServerWritableStream<GenerateRequest, GenerateEvent>,
  'request' | 'write' | 'end' | 'on' | 'once'
>;

export interface Seen {
  readonly request: GenerateRequest;
  /** Resolves when the client cancelled the call. */
  readonly cancelled: Promise<void>;
}

export class ScriptedEngine {
  readonly seen: Seen[] = [];
  readonly calls: Call[] = [];
  /** Calls that carry many. */
  manyCalls = 0;
  description: Description;
  /** What a call does. */
  script: (call: Call, request: GenerateRequest) => void | Promise<void> = () => {};
  prometheus = '# TYPE kvtier_engine_steps_total counter\nkvtier_engine_steps_total 7\n';
  resets = 0;
  /** How often it was asked what it is. */
  described = 0;
  readonly pins: PinPrefixRequest[] = [];
  pinRefusal: KvError | undefined;
  readonly prefetches: PrefetchRequest[] = [];
  /** What it was told of hand-offs; and whether a request waited for blocks under that id. */
  readonly changes: ChangeHandOffRequest[] = [];
  change: (request: ChangeHandOffRequest) => boolean = () => true;
  readonly firstTokens: TellFirstTokenRequest[] = [];
  /** What its load says; `tell` sends it. */
  load: Partial<EngineLoad> = {};
  draining = false;
  /** It tells its load by itself, as a worker does; false: only `tell` does. */
  alive = true;
  readonly watches = new Set<Watch>();
  #server: RunningGrpcServer | undefined;
  #life: NodeJS.Timeout | undefined;
  #told = 0;
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
      hashAlgorithm: 'sha256_cbor',
      hashSeed: 'seed',
      modelDigest: 'ab'.repeat(32),
      bootEpoch: randomBytes(8).toString('hex'),
      maxSequences: 0,
      maxStepTokens: 0,
      namespaces: [],
      generatesMany: true,
    };
  }

  async start(): Promise<void> {
    this.#life = setInterval(() => this.alive && this.tell(), lifeMs);
    this.#life.unref();
    this.#server = await startGrpcServer(this.#address, (server) =>
      server.addService(EngineService, {
        describe: unary(() => {
          this.described++;
          return this.description;
        }),
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
        prefetch: unary((request) => {
          this.prefetches.push(request);
          return { blocks: Math.floor(request.promptTokenIds.length / this.description.blockTokens) };
        }),
        changeHandOff: unary((request) => {
          this.changes.push(request);
          return { done: this.change(request) };
        }),
        tellFirstToken: unary((request) => {
          this.firstTokens.push(request);
          return { done: true };
        }),
        resetPrefixCache: unary(() => ({ done: ++this.resets === 1 })),
        drain: unary(() => {
          this.draining = true;
          this.tell();
          return { left: 0 };
        }),
        watchLoad: (call: Watch) => {
          this.watches.add(call);
          call.on('cancelled', () => this.watches.delete(call));
          if (this.alive) this.tell({}, call);
        },
        generate: (call: Call) => this.#take(call),
        generateMany: (call: ServerDuplexStream<GenerateOrder, GenerateEvents>) => {
          this.manyCalls++;
          call.setMaxListeners(0); // one for each request
          const running = new Map<number, EventEmitter>();
          call.on('data', ({ number, begin }: GenerateOrder) => {
            if (begin === undefined) {
              running.get(number)?.emit('cancelled');
              running.delete(number);
              return;
            }
            const one = Object.assign(new EventEmitter(), {
              request: { ...begin, promptTokenIds: Array.from(begin.promptTokenIds) }, // a long one came as typed ids
              write: (event: GenerateEvent) => running.has(number) && call.write({ events: [{ number, event }] }),
              end: () => running.delete(number),
            });
            call.on('drain', () => one.emit('drain'));
            running.set(number, one);
            this.#take(one as unknown as Call);
          });
          call.on('cancelled', () => {
            for (const one of running.values()) one.emit('cancelled');
            running.clear();
          });
        },
      }),
    );
  }

  #take(call: Call): void {
    const cancelled = new Promise<void>((resolve) => call.on('cancelled', () => resolve()));
    this.calls.push(call);
    this.seen.push({ request: call.request, cancelled });
    void this.script(call, call.request);
  }

  /** One message of its load, to one watcher or to all. */
  tell(part: Partial<EngineLoad> = {}, to?: Watch): void {
    const { bootEpoch } = this.description;
    for (const call of to ? [to] : this.watches) {
      const draining = this.draining;
      call.write({ ...engineLoad(), bootEpoch, draining, count: BigInt(++this.#told), ...this.load, ...part });
    }
  }

  /** Cuts running calls, as a killed worker does. */
  async stop(): Promise<void> {
    clearInterval(this.#life);
    this.watches.clear();
    await this.#server?.close(0);
  }
}

export const engineLoad = (): EngineLoad => ({
  bootEpoch: '',
  count: 0n,
  draining: false,
  waiting: 0,
  running: 0,
  tokensAhead: 0n,
  usedBlocks: 0n,
  totalBlocks: 100n,
  waitingBlocks: 0n,
  loadAheadS: 0,
  rates: undefined,
  taken: [],
  begun: [],
  ended: [],
});

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
