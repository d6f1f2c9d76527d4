/**
 * The coordinator, put together from its configuration.
 *
 *     discovery ─► fleet (who is alive, how loaded) ──┐
 *     KV events ─► indexes (who holds what), by model ├─► dispatcher (who gets it) ─┬─► API server
 *                                                     │  hand-offs (who computes its prompt) ◄─┘  └─► endpoint picker, for gateways
 */
import { makeApiServer } from '@kvtier/api-server';
import { type CoordinatorConfig, readEventAccess, WorkerAccess } from '@kvtier/config';
import { Dispatcher } from '@kvtier/dispatch';
import { type EndpointPicker, startEndpointPicker } from '@kvtier/endpoint-picker';
import { Copies, HandOffs, InTime } from '@kvtier/handoff';
import { type ExternalScaler, Planner, plannerMetrics, startScaler } from '@kvtier/planner';
import { PodHandOff } from '@kvtier/pod-handoff';
import { createDiscovery, Fleet } from '@kvtier/registry';
import { lateBindingDefaults } from '@kvtier/routing';
import { type Logger, tellRenewed } from '@kvtier/telemetry';
import { discoveryOf } from './discovery-of.ts';
import { Indexes } from './indexes.ts';
import { CoordinatorMetrics } from './metrics.ts';
import { checkTokenizers } from './tokenizer-folders.ts';

export interface Coordinator {
  readonly url: string;
  /** Where probes and scrapes ask, if they have a listener of their own. */
  readonly operationsUrl: string | undefined;
  /** Where gateways ask, and its health: "IP:PORT". */
  readonly endpointPicker: Pick<EndpointPicker, 'address' | 'healthAddress'> | undefined;
  /** Where KEDA asks: "IP:PORT". */
  readonly scaler: Pick<ExternalScaler, 'address'> | undefined;
  /** When a model is served, or none has come for a while. @throws KvError MODEL: none can be */
  readonly served: Promise<void>;
  close(): Promise<void>;
}

/** Resolves when all of it listens. @throws KvError: what can never work, in one line (CONFIG, LOCKED, SETUP, MODEL) */
export async function startCoordinator(config: CoordinatorConfig, logger: Logger): Promise<Coordinator> {
  const { routing, handoff, admission, index, access, host, port, tls, tokenizers } = config;
  const { apiKeysFile, adminKeysFile, trustedNetwork, operations, limits } = config;
  checkTokenizers(tokenizers, (line) => logger.warn(line));
  const discovery = discoveryOf(config);
  const workerAccess = access && new WorkerAccess(access, tellRenewed(logger, 'worker access: files'));
  const times = { podSilentMs: routing.silentMs };
  const fleet = new Fleet({ logger, media: Indexes.media, times, ...(workerAccess && { access: workerAccess }) });
  const eventAccess = readEventAccess(config.kvEvents, tellRenewed(logger, 'KV events: keys'));
  const isPlanned = config.planner.scaler !== null || config.planner.roles === 'live';
  const indexes = new Indexes({ fleet, maxBytes: index.maxBytes, tokenizers, access: eventAccess, isPlanned, logger });
  const dispatcher = new Dispatcher({
    workers: fleet,
    holdings: indexes,
    policy: routing.policy,
    late: { ...lateBindingDefaults, maxHeld: routing.maxWaiting },
    maxWaitMs: routing.maxWaitMs,
    prefillServes: handoff.fallback,
  });
  const { ttftMs } = handoff;
  const copies = new Copies({ engines: fleet, holdings: indexes, limits: routing.copies, ttftMs, logger });
  const handOffs = new HandOffs({ engines: fleet, holdings: indexes, limits: handoff, copies, logger });
  const planner = new Planner({ workers: fleet, config: config.planner });
  const dispatch = planner.watch(dispatcher);
  const pods = new PodHandOff({ dispatch, pods: fleet, config: config.podHandOff });
  const inTime = new InTime(() => handOffs.metrics.refused('late'));
  const metrics = new CoordinatorMetrics({ dispatch: dispatcher, indexes, fleet });
  const planned = plannerMetrics(planner);
  let picker: EndpointPicker | undefined;
  let scaler: ExternalScaler | undefined;
  let isOpen = false;
  const isReady = (): boolean => isOpen && fleet.isListed;
  const made = makeApiServer({
    ...{ host, port, tls, apiKeysFile, adminKeysFile, trustedNetwork, operations },
    ...{ engines: fleet, dispatch, handOffs, pods, logger, tokenizers },
    logRequests: config.logRequests,
    isReady,
    ...{ inTime, ttftMs: admission.ttftMs ?? undefined },
    media: Indexes.media,
    limits: {
      ...{ connections: limits.connections, requests: limits.requests },
      ...{ answersRunning: limits.answers, heldBytes: limits.heldBytes },
      ...{ bodyBytes: limits.bodyBytes, largeBodyMs: limits.largeBodyMs },
      ...{ absentMs: routing.absentMs, closeGraceMs: config.drainMs },
    },
    readerBodyBytes: config.endpointPicker?.bodyBytes,
    degraded: () => (fleet.discoveryProblem === undefined ? [] : ['discovery']),
    guesses: () => indexes.isGuessing,
    parts: () => ({ routing: dispatcher.stats(), indexes: indexes.state(), discovery: fleet.discoveryProblem ?? 'ok' }),
    plans: () => planner.plans(),
    moreMetrics: async () => {
      const texts = [metrics.text(), planned(), handOffs.metrics.text(), copies.metrics.text(), pods.metrics.text()];
      return (await Promise.all([...texts, picker?.metrics() ?? ''])).join('');
    },
  });
  /** Takes `drainMs`, and a second in which answers are told that they are cut, at most. */
  const end = async (): Promise<void> => {
    fleet.ending();
    planner.close();
    copies.close();
    const pickerClosed = picker?.close(config.drainMs); // until then it reads bodies by the API server
    await Promise.all([pickerClosed, scaler?.close(), made.close(pickerClosed)]);
    dispatcher.close();
    indexes.close();
    await fleet.close();
    workerAccess?.close();
  };
  let ended: Promise<void> | undefined;
  const close = (): Promise<void> => (ended ??= end());
  try {
    await fleet.start(createDiscovery(discovery, logger));
    await reached(fleet);
    planner.start();
    const { url, operationsUrl, reader, served } = await made.open();
    logger.info({ url }, 'API server open');
    if (operationsUrl !== undefined) logger.info({ url: operationsUrl }, 'operations: probes and metrics');
    if (config.endpointPicker !== null) {
      const workers = () => fleet.workers();
      const ttftMs = admission.ttftMs ?? undefined;
      const parts = { dispatch, workers, outcomes: fleet, reader, pods, inTime, ttftMs, isReady, logger };
      picker = await startEndpointPicker({ config: config.endpointPicker, ...parts });
      const { address, healthAddress } = picker;
      logger.info({ address, healthAddress }, 'endpoint picker: gateways may ask');
    }
    if (config.planner.scaler !== null) {
      scaler = await startScaler({ config: config.planner.scaler, planner, logger });
      logger.info({ address: scaler.address }, 'scaler: KEDA may ask');
    }
    isOpen = true;
    return { url, operationsUrl, endpointPicker: picker, scaler, served, close };
  } catch (error) {
    await close();
    throw error;
  }
}

/** A coordinator that starts again must not turn away what workers that live could serve: each has this long to be reached. */
const reachMs = 1_000;

/** Until no worker is on its way, or `reachMs` have passed. */
function reached(fleet: Fleet): Promise<void> {
  return new Promise((resolve) => {
    const end = (): void => {
      stop();
      clearTimeout(timer);
      resolve();
    };
    const look = (): void => {
      const workers = fleet.workers().filter((worker) => worker !== undefined);
      if (workers.length > 0 && workers.every(({ state }) => state !== 'joining')) end();
    };
    const timer = setTimeout(end, reachMs);
    const stop = fleet.onChange(look);
    look();
  });
}
