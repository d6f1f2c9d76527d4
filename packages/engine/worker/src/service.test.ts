/** The gRPC service over a scripted scheduler: what a client gets, and what the scheduler hears of it. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { KvError } from '@kvtier/errors';
import type { EngineLoadFigures, EngineStats, GenerateRequest, OnOutput } from '@kvtier/scheduler';
import {
  clientCredentials,
  EngineClient,
  EngineService,
  fromStatus,
  type GenerateEvent,
  type RunningGrpcServer,
  startGrpcServer,
  type GenerateRequest as WireRequest,
} from '@kvtier/wire/grpc';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { LoadWatches } from './load-watches.ts';
import { WorkerMetrics } from './metrics.ts';
import type { PrefetchAsked } from './prefix-prefetches.ts';
import { engineService } from './service.ts';
import { SharedCalls } from './shared-calls.ts';

/** Of conditions that hold at once, on a machine that does many other things. */
const patience = { timeout: 20_000 };

class ScriptedEngine {
  readonly submitted: { params: GenerateRequest; onOutput: OnOutput }[] = [];
  readonly aborted: string[] = [];
  readonly changes: [string, number][] = [];
  refusal: KvError | undefined;

  submit(params: GenerateRequest, onOutput: OnOutput): void {
    if (this.refusal) throw this.refusal;
    this.submitted.push({ params, onOutput });
  }

  abort(id: string): boolean {
    this.aborted.push(id);
    return true;
  }

  changeHandOff(id: string, blocks: number): boolean {
    this.changes.push([id, blocks]);
    return true;
  }

  readonly firstTokens: [string, number][] = [];
  tellFirstToken(id: string, tokenId: number): boolean {
    this.firstTokens.push([id, tokenId]);
    return true;
  }

  resetPrefixCache = (): boolean => true;
  drain = (): number => this.submitted.length;

  readonly pins = new Map<string, readonly number[]>();
  pinPrefix(name: string, promptTokenIds: Int32Array | Uint32Array, cacheSalt = ''): number {
    if (this.pins.has(name)) throw new KvError('REQUEST', `pinned prefix ${name}: is pinned already; unpin it first`);
    this.pins.set(name, [...promptTokenIds, cacheSalt.length]);
    return promptTokenIds.length;
  }
  unpinPrefix = (name: string): boolean => this.pins.delete(name);
}

const stats: EngineStats = {
  waiting: 1,
  running: 2,
  loading: 3,
  blockCount: 4,
  freeBlocks: 5,
  cachedBlocks: 6,
  exportBlocks: 7,
  steps: 8,
  failedSteps: 0,
  begunAnew: 0,
  prefillTokens: 0,
  decodeTokens: 0,
  promptTokens: 0,
  hitTokens: 0,
  loadedTokens: 0,
  loads: 0,
  shortLoads: 0,
  layeredLoads: 0,
  headLoads: 0,
  expiredMatches: 0,
  expiredLoads: 0,
  exportedBlocks: 0,
  skippedExportBlocks: 0,
  preemptions: 0,
  handOffs: 3,
  awaiting: 1,
  handOffEnds: { complete: 2, awaited: 1 },
  handedTokens: 0,
  prefills: 0,
  prefilledBlocks: 0,
  finished: 0,
  aborted: 0,
  failed: 0,
};

const figures: EngineLoadFigures = {
  waiting: 0,
  running: 0,
  tokensAhead: 0,
  stepTokens: 0,
  stepForS: 0,
  usedBlocks: 0,
  totalBlocks: 4,
  waitingBlocks: 0,
  loadAheadS: 0,
  prefillTokensPerS: 0,
  stepS: 0,
  stepPerRequestS: 0,
  prefillStepS: 0,
  pacingTrust: 0,
  freedBlocksPerS: 0,
  loadBlocksPerS: {},
};

let folder: string;
let engine: ScriptedEngine;
let metrics: WorkerMetrics;
let watches: LoadWatches;
let prefetched: PrefetchAsked[];
let server: RunningGrpcServer;
let client: EngineClient;

beforeEach(async () => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-service-'));
  engine = new ScriptedEngine();
  metrics = new WorkerMetrics({ engine: () => stats, connector: null });
  const describe = () => ({
    model: 'm',
    modelDir: '/m',
    maxModelTokens: 64,
    blockTokens: 16,
    vocabSize: 10,
    stopTokenIds: [2],
    backend: 'cpu',
    tierAttached: false,
    blockCount: 4n,
    blockBytes: 64n,
    hashAlgorithm: 'sha256_cbor',
    hashSeed: 'seed',
    modelDigest: 'ab',
    bootEpoch: 'epoch',
    maxSequences: 8,
    maxStepTokens: 512,
    maxTotalTokens: 48n,
    namespaces: ['00112233aabbccdd'],
  });
  prefetched = [];
  const prefetches = {
    begin: (asked: PrefetchAsked) => {
      prefetched.push(asked);
      return 2;
    },
  };
  watches = new LoadWatches({ load: () => figures, draining: () => false, bootEpoch: 'epoch' });
  server = await startGrpcServer(`unix:${join(folder, 's')}`, (grpc) =>
    grpc.addService(
      EngineService,
      engineService({ engine, describe, metrics, watches, prefetches, shared: new SharedCalls() }),
    ),
  );
  client = new EngineClient(server.address, clientCredentials(server.address));
});
afterEach(async () => {
  client.close();
  await server.close();
  rmSync(folder, { recursive: true });
});

const request = {
  requestId: 'r',
  promptTokenIds: [1, 2, 3],
  maxTokens: 4,
  temperature: 0.5,
  topK: 3,
  topP: 0.5,
  seed: 7n,
  ignoreEos: true,
  stopTokenIds: [5],
  cacheSalt: 'tenant',
  loraName: '',
};

function generate(more: Partial<WireRequest> = {}) {
  const events: GenerateEvent[] = [];
  const call = client.generate({ ...request, ...more });
  call.on('data', (event: GenerateEvent) => events.push(event));
  const ended = new Promise<string>((resolve) => {
    call.on('error', (error) => resolve(error.message));
    call.on('end', () => resolve('end'));
  });
  return { call, events, ended };
}

it('a request goes in whole, its tokens come out as they are drawn', async () => {
  const { events, ended } = generate();
  await vi.waitFor(() => expect(engine.submitted).toHaveLength(1), patience);
  const { params, onOutput } = engine.submitted[0]!;
  expect(params).toEqual({ ...request, requestId: 'r@0', promptTokenIds: Uint32Array.of(1, 2, 3) });
  const cache = {
    promptTokens: 3,
    cachedTokens: 2,
    tokensByTier: { disk: 2 },
    queueUs: 1.4,
    loadUs: 2.6,
    prefillUs: 3,
  };
  onOutput({ tokenIds: [8], finishReason: '', cache });
  onOutput({ tokenIds: [9], finishReason: 'stop' });
  expect(await ended).toBe('end');
  expect(events).toEqual([
    { tokenIds: [8], finishReason: '', cache: { ...cache, queueUs: 1, loadUs: 3 }, failure: undefined },
    { tokenIds: [9], finishReason: 'stop', cache: undefined, failure: undefined },
  ]);
  expect(engine.aborted).toEqual([]);
  const text = await metrics.text();
  expect(text).toContain('kvtier_engine_tokens_total{kind="answer"} 2');
  expect(text).toContain('kvtier_engine_cached_tokens_total{tier="disk"} 2');
  expect(text).toContain('kvtier_engine_requests_total{outcome="stop"} 1');
  expect(text).toContain('kvtier_engine_free_blocks 5');
  expect(text).toContain('kvtier_engine_events_total{event="steps"} 8');
});

it('a refusal and a failure in the middle both end the stream with the code', async () => {
  engine.refusal = new KvError('BUSY', 'full', { retry: true });
  const refused = generate();
  expect(await refused.ended).toBe('end');
  expect(refused.events).toMatchObject([{ failure: { code: 'BUSY', message: 'full', retry: true } }]);
  engine.refusal = undefined;
  const failing = generate();
  await vi.waitFor(() => expect(engine.submitted).toHaveLength(1), patience);
  engine.submitted[0]!.onOutput({ tokenIds: [], finishReason: '', error: new KvError('IO', 'gone') });
  expect(await failing.ended).toBe('end');
  expect(failing.events).toMatchObject([{ failure: { code: 'IO', message: 'gone' } }]);
});

it('cancelling aborts the request, once; what the scheduler still says goes nowhere', async () => {
  const { call, events, ended } = generate();
  await vi.waitFor(() => expect(engine.submitted).toHaveLength(1), patience);
  call.cancel();
  expect(await ended).toMatch(/CANCELLED/);
  await vi.waitFor(() => expect(engine.aborted).toEqual(['r@0']), patience);
  engine.submitted[0]!.onOutput({ tokenIds: [], finishReason: 'abort' });
  expect(events).toEqual([]);
  expect(await metrics.text()).toContain('kvtier_engine_requests_total{outcome="CANCELLED"} 1');
});

it('prefixes are pinned and unpinned by name, and refused with the code', async () => {
  const pin = (name: string) =>
    new Promise<unknown>((resolve) =>
      client.pinPrefix({ name, promptTokenIds: [1, 2, 3], cacheSalt: 'tenant' }, (error, answer) =>
        resolve(error ? fromStatus(error).code : answer.pinnedTokens),
      ),
    );
  const unpin = (name: string) =>
    new Promise<unknown>((resolve) => client.unpinPrefix({ name }, (error, answer) => resolve(error ?? answer.done)));
  expect([await pin('a'), await pin('a'), await pin(''), await pin('n'.repeat(257))]).toEqual([
    3,
    'REQUEST',
    'REQUEST',
    'REQUEST',
  ]);
  expect(engine.pins.get('a')).toEqual([1, 2, 3, 'tenant'.length]);
  expect([await unpin('a'), await unpin('a')]).toEqual([true, false]);
});

it('a hand-off is told and changed under the name that its caller gave it; of two calls of one name the last is meant', async () => {
  const change = (requestId: string, blocks: number) =>
    new Promise<unknown>((resolve) =>
      client.changeHandOff({ requestId, blocks }, (error, answer) => resolve(error ?? answer.done)),
    );
  expect(await change('r', 0)).toBe(false);
  const plain = generate();
  await vi.waitFor(() => expect(engine.submitted).toHaveLength(1), patience);
  expect(await change('r', 0)).toBe(false);
  const handOff = { blocks: 2, stallMs: 10, deadlineMs: 20 };
  const first = generate({ handOff });
  await vi.waitFor(() => expect(engine.submitted).toHaveLength(2), patience);
  const second = generate({ handOff });
  await vi.waitFor(() => expect(engine.submitted).toHaveLength(3), patience);
  expect(engine.submitted[2]!.params.handOff).toEqual(handOff);
  expect(await change('r', 1)).toBe(true);
  expect(engine.changes).toEqual([['r@2', 1]]);
  const tell = (requestId: string, tokenId: number) =>
    new Promise<unknown>((resolve) =>
      client.tellFirstToken({ requestId, tokenId }, (error, answer) => resolve(error ?? answer.done)),
    );
  expect([await tell('r', 7), await tell('nobody', 7)]).toEqual([true, false]);
  expect(engine.firstTokens).toEqual([['r@2', 7]]);
  const { onOutput } = engine.submitted[2]!;
  onOutput({ tokenIds: [], finishReason: '', handOff: { localBlocks: 1, readyBlocks: 0 } });
  const cache = { promptTokens: 3, cachedTokens: 2, tokensByTier: {}, queueUs: 0, loadUs: 0, prefillUs: 0 };
  onOutput({
    ...{ tokenIds: [8], finishReason: 'stop' },
    cache: { ...cache, handedTokens: 2, handOffUs: 1.4, tailUs: 2.6 },
  });
  expect(await second.ended).toBe('end');
  expect(second.events).toMatchObject([
    { tokenIds: [], finishReason: '', handOff: { localBlocks: 1, readyBlocks: 0 } },
    { tokenIds: [8], finishReason: 'stop', cache: { ...cache, handedTokens: 2, handOffUs: 1, tailUs: 3 } },
  ]);
  expect(await change('r', 0)).toBe(false);
  for (const { call } of [plain, first]) call.cancel();
  const text = await metrics.text();
  expect(text).toContain('kvtier_engine_hand_offs_total{outcome="awaited"} 1');
  expect(text).toContain('kvtier_engine_awaiting 1');
  expect(text).toContain('kvtier_engine_tail_seconds_count 1');
});

it('prefill for another worker ends without a token, and is nobody’s time to a first token', async () => {
  const { events, ended } = generate({ prefillOnly: { blocks: 3 } });
  await vi.waitFor(() => expect(engine.submitted).toHaveLength(1), patience);
  expect(engine.submitted[0]!.params.prefillOnly).toEqual({ blocks: 3 });
  const { onOutput } = engine.submitted[0]!;
  const cache = { promptTokens: 3, cachedTokens: 2, tokensByTier: {}, queueUs: 0, loadUs: 0, prefillUs: 0 };
  const handOff = { localBlocks: 0, readyBlocks: 3 };
  onOutput({ tokenIds: [], finishReason: '', handOff: { localBlocks: 0, readyBlocks: 1 } });
  onOutput({ tokenIds: [], finishReason: 'prefilled', cache, handOff });
  expect(await ended).toBe('end');
  expect(events).toMatchObject([
    { finishReason: '', handOff: { readyBlocks: 1 } },
    { finishReason: 'prefilled', cache, handOff },
  ]);
  const text = await metrics.text();
  expect(text).toContain('kvtier_engine_requests_total{outcome="prefilled"} 1');
  expect(text).toContain('kvtier_engine_time_to_first_token_seconds_count 0');
});

it('passes on what should be brought in ahead', async () => {
  const request = { promptTokenIds: [1, 2, 3], cacheSalt: 's', deadlineMs: 500 };
  const answer = await new Promise((resolve, reject) =>
    client.prefetch(request, (error, value) => (error ? reject(error) : resolve(value))),
  );
  expect(answer).toEqual({ blocks: 2 });
  expect(prefetched).toEqual([request]);
});
