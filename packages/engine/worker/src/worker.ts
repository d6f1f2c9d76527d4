/**
 * Puts an engine worker together: model → executor → identity → connector → scheduler → gRPC, and takes it apart in the
 * opposite order. Nothing is served before the model is loaded; the cache node may come and go at any time.
 */
import { randomBytes } from 'node:crypto';
import { setTimeout as setTimer } from 'node:timers/promises';
import { type EngineWorkerConfig, readGroup } from '@kvtier/config';
import { type ArenaPin, createExecutor, type Executor } from '@kvtier/executor';
import { ChainHasher, keysAndValues, layoutFingerprint, type Namespace, namespaceOf } from '@kvtier/identity';
import { Engine, noConnector } from '@kvtier/scheduler';
import { endProcessAfter, type Logger, type RunningService, tellRenewed } from '@kvtier/telemetry';
import { EngineService, startGrpcServer, TlsServerCredentials } from '@kvtier/wire/grpc';
import { engineLimits } from './engine-limits.ts';
import { LoadWatches } from './load-watches.ts';
import { WorkerMetrics } from './metrics.ts';
import type { OpenConnector } from './open-connector.ts';
import { PrefixPrefetches } from './prefix-prefetches.ts';
import { engineService, liveness } from './service.ts';
import { SharedCalls } from './shared-calls.ts';
import { readStopTokenIds } from './stop-ids.ts';
import { readTextDigests, type TextDigests } from './text-files.ts';

/** For streams to be closed in order when the worker stops. */
const graceMs = 1_000;
/** Between two looks whether it has ended what it had. */
const lookMs = 10;
/** What the list of members may hold up the end of a worker. */
const listMs = 300;
/** Of a namespace's digest, as events of cache nodes name it. */
const namespaceDigits = 16;

/** `openConnector`: what stands between this engine and its cache node; the process that runs the worker brings it along. */
export async function startWorker(
  config: EngineWorkerConfig,
  logger: Logger,
  openConnector: OpenConnector,
): Promise<RunningService> {
  const { executor, stopTokenIds, texts } = await openExecutor(config, logger);
  const hasher = new ChainHasher({
    algorithm: config.hashAlgorithm,
    blockTokens: config.blockTokens,
    rootSeed: config.hashSeed,
  });
  const namespaces = namespacesOfWorker(executor, hasher);
  const connector =
    config.cacheNodeSocket === null
      ? null
      : openConnector({
          socketPath: config.cacheNodeSocket,
          group: readGroup(config.group),
          arenaDir: config.arenaDir,
          executor,
          namespace: namespaces.map(({ digest }) => digest),
          hashBytes: hasher.hashBytes,
          loadDeadlineMs: config.loadDeadlineMs,
          loads: config.loads,
          tenant: config.tenant,
          ttlSeconds: config.ttlSeconds ?? 0,
          logger,
          onWake: () => engine.wake(),
          onPassed: (byTier, us) => engine.passed(byTier, us),
        });
  const events = config.kvEvents && (await (await import('./kv-events.ts')).startKvEvents(config.kvEvents, logger));
  const bootEpoch = randomBytes(8).toString('hex');
  // Before the engine, which tells of its load from its first turn on.
  const watches = new LoadWatches({ load: () => engine.load(), draining: () => engine.draining, bootEpoch });
  const engine = new Engine({
    executor,
    connector: connector ?? noConnector,
    hasher,
    eosTokenIds: stopTokenIds,
    prefixCache: config.prefixCache,
    radixPolicy: config.radixPolicy,
    evictionPolicy: config.evictionPolicy,
    dedupBlocks: config.dedupBlocks,
    maxPinnedBlocks: config.maxPinnedBlocks,
    writeDownAheadBlocks: config.writeDown === 'ahead' ? config.writeDownAheadBlocks : undefined,
    limits: engineLimits(config, executor.maxStepTokens),
    logger,
    ...(events && {
      onPackedEvents: (changes) => events.publishPacked(changes),
      packedHashBytes: events.packedHashBytes,
    }),
    onLoad: () => watches.changed(),
    onStep: ({ elapsedUs }) => metrics.observeStep(elapsedUs),
    onDefect: () => {
      // Failed requests reach their clients first; then the supervisor starts a sound worker.
      endProcessAfter(1, graceMs, 'engine-worker');
    },
  });
  events?.tellSnapshots(() => engine.heldEvents());
  const metrics = new WorkerMetrics({ engine: () => engine.stats(), connector, events, executor });
  const { model, kv } = executor;
  const description = {
    model: config.servedName,
    modelDir: config.modelDir,
    maxModelTokens: model.maxModelTokens,
    blockTokens: kv.blockTokens,
    vocabSize: model.vocabSize,
    stopTokenIds,
    backend: executor.backend,
    blockCount: BigInt(executor.blockCount),
    blockBytes: BigInt(kv.blockBytes),
    hashAlgorithm: config.hashAlgorithm,
    hashSeed: config.hashSeed,
    modelDigest: Buffer.from(executor.modelDigest).toString('hex'),
    bootEpoch,
    ...texts,
    generatesMany: true,
    maxStepTokens: executor.maxStepTokens,
    maxTotalTokens: BigInt(engine.maxTotalTokens),
    maxSequences: Math.min(config.maxSequences, executor.maxStepTokens), // as the engine does: each that runs gets a token a step
    namespaces: namespaces.map(({ digest }) => Buffer.from(digest).toString('hex').slice(0, namespaceDigits)),
  };
  const describe = () => ({ ...description, tierAttached: connector?.attached ?? false });
  const { vocabSize } = model;
  const prefetches = new PrefixPrefetches({
    connector: connector ?? noConnector,
    ...{ hasher, vocabSize, maxTokens: engine.maxTotalTokens },
  });
  const shared = new SharedCalls();
  const tls = config.tls === null ? undefined : tlsOf(config.tls, logger);
  const requestLogger = config.logRequests ? logger : undefined;
  const service = engineService({ engine, describe, metrics, watches, prefetches, shared, requestLogger });
  const server = await startGrpcServer(config.listen, (grpc) => grpc.addService(EngineService, service), {
    credentials: tls,
    channel: liveness,
  });
  logger.info({ ...executor.describe?.() }, 'the model is loaded');
  logger.info({ model: config.servedName, blocks: executor.blockCount, address: server.address }, 'engine serves');
  const listening = { address: server.address, events };
  const member =
    config.membership && (await import('./membership.ts')).joinCluster(config.membership, listening, logger);
  return {
    ready: { address: server.address, model: config.servedName },
    close: async () => {
      // Nothing new comes from who has read that; what comes all the same is refused, and goes elsewhere.
      await Promise.all([member?.drain(listMs), drained(engine, config.drainMs)]);
      watches.close();
      shared.close();
      await server.close(graceMs);
      tls?.close();
      await member?.close();
      await engine.close();
      await events?.close();
      prefetches.close();
      await connector?.close();
      await executor.close();
    },
  };
}

/** Who comes with a certificate of its authority. Renewed files serve the next connection. @throws KvError CONFIG */
const tlsOf = (files: NonNullable<EngineWorkerConfig['tls']>, logger: Logger): TlsServerCredentials =>
  new TlsServerCredentials(files, {
    place: 'tls',
    reloadMs: files.reloadMs,
    onProblem: tellRenewed(logger, 'TLS files'),
  });

/** Nothing new is taken; until what is there has ended, or `drainMs` have passed. */
async function drained(engine: Engine, drainMs: number): Promise<void> {
  engine.drain();
  const endMs = performance.now() + drainMs;
  while (engine.requestCount > 0 && performance.now() < endMs) await setTimer(lookMs);
}

/** The executor with as many KV blocks as the configured bytes, or the GPU's share, hold. */
async function openExecutor(
  config: EngineWorkerConfig,
  logger: Logger,
): Promise<{ executor: Executor; stopTokenIds: number[]; texts: Partial<TextDigests> }> {
  const { modelDir, blockTokens, kvBytes, maxSequences, threads, backend } = config;
  const maxStepTokens = config.maxStepTokens ?? ('measured' as const);
  const { memoryUtilization, computeDtype, kvDtype, cublaslt, captureAtStart, ...gpu } = config.gpu;
  const options = {
    modelDir,
    blockTokens,
    maxStepTokens,
    maxStepSequences: maxSequences,
    backend,
    gpu: {
      ...gpu,
      ...(computeDtype && { computeDtype }),
      ...(kvDtype && { kvDtype }),
      ...(cublaslt && { cublaslt }),
      ...(captureAtStart !== undefined && { captureAtStart }),
    },
    ...(threads === undefined ? {} : { threads }),
  };
  let stopTokenIds: number[] = [];
  let texts: Partial<TextDigests> = {};
  const executor = await createExecutor({
    ...options,
    blockCount: { kvBytes, gpuMemoryUtilization: memoryUtilization },
    onPinned: (pin) => tellPinned(pin, logger),
    alongside: ({ vocabSize }) => {
      stopTokenIds = readStopTokenIds(modelDir, vocabSize);
      texts = readTextDigests(modelDir);
    },
  });
  return { executor, stopTokenIds, texts };
}

/** Pinned, copies run at the bus's speed; not, at that of the CPU. */
function tellPinned({ bytes, pinned, seconds, refusal }: ArenaPin, logger: Logger): void {
  const what = { bytes, seconds };
  if (pinned) logger.info(what, 'the arena is pinned for the GPU');
  else logger.warn(what, `the arena is not pinned, copies go through buffers at the speed of the CPU: ${refusal}`);
}

/** One per attention group: blocks of different groups hold different layers under the same chain hash. */
function namespacesOfWorker(executor: Executor, hasher: ChainHasher): Namespace[] {
  const { groups = [undefined] } = executor.kv;
  return groups.map((_, group) =>
    namespaceOf({
      modelDigest: executor.modelDigest,
      kvDtype: executor.kv.dtype,
      blockTokens: executor.kv.blockTokens,
      algorithm: hasher.algorithm,
      root: hasher.root,
      group,
      layoutFingerprint: layoutFingerprint(keysAndValues(executor.kv)),
    }),
  );
}
