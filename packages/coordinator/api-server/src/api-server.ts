/**
 * The API server: an HTTP server with OpenAI's API in front of the workers of a cluster.
 *
 *   POST /v1/completions · POST /v1/chat/completions · GET /v1/models · GET /v1/models/{id}
 *   GET /health · GET /metrics · POST /admin/reset_prefix_cache, /admin/pin_prefix, /admin/unpin_prefix, /admin/drain
 *   GET /admin/planner
 *   (routes.ts); for probes and scrapes on a listener of their own, too (operations.ts)
 *
 * Invariants: beyond loopback it listens only with TLS and with keys or clients' certificates, or where the network is said to be trusted;
 * every body, connection and wait is bounded; every failure has OpenAI's shape; while no worker serves, /health is 503, and it comes back
 * by itself.
 */
import type { IncomingHttpHeaders } from 'node:http';
import { isLoopback } from '@kvtier/config';
import type { Dispatch } from '@kvtier/dispatch';
import { KvError } from '@kvtier/errors';
import { type HandOffs, InTime } from '@kvtier/handoff';
import { PodHandOff } from '@kvtier/pod-handoff';
import { type Logger, tellRenewed } from '@kvtier/telemetry';
import { ApiKeys } from './api-keys.ts';
import { bearsKeyOf, Callers } from './callers.ts';
import type { Engines } from './engines.ts';
import { Expected } from './expected.ts';
import { Generation } from './generation.ts';
import { createHttpApp, type HttpLimits, type ServerTls } from './http-server.ts';
import { type ApiServerLimits, limitsOf } from './limits.ts';
import { RequestMetrics } from './metrics.ts';
import { Models } from './models.ts';
import { addOperations } from './operations.ts';
import { PromptReader } from './prompt-reader.ts';
import { addRoutes, metricsTextOf } from './routes.ts';
import { TextPool } from './text-pool.ts';
import { SharedMetrics } from './worker-metrics.ts';

/** Where a listener is, and that whoever reaches it may. */
interface Place {
  /** An IP address, or localhost. */
  readonly host: string;
  /** 0: any free one */
  readonly port: number;
  /** null: plain text. */
  readonly tls?: ServerTls | null;
  /** Of a network beyond loopback. */
  readonly trustedNetwork?: boolean;
}

export interface ApiServerOptions extends Place {
  /** Files of keys: a request bears one of the first, what administers workers one of the second. null: none is asked for. */
  readonly apiKeysFile?: string | null;
  readonly adminKeysFile?: string | null;
  /** Probes and metrics on a listener of their own; null: only here. */
  readonly operations?: Place | null;
  /** Whether the members are known, for probes. */
  readonly isReady?: () => boolean;
  /** The workers, and who chooses among them; their owner closes them. */
  readonly engines: Engines;
  readonly dispatch: Dispatch;
  /** Has other workers compute prompts where that pays; undefined: nobody does. */
  readonly handOffs?: Pick<HandOffs, 'follow'>;
  /** Until the first token of a request that does not say so itself: refused when it would come later. undefined: never. */
  readonly ttftMs?: number | undefined;
  /** Folder of tokenizer and chat template by model name, for models whose workers do not say it. */
  readonly tokenizers?: Readonly<Record<string, string>>;
  /** Names of the KV index's media, by their numbers. */
  readonly media?: readonly string[];
  /** What is less than it should be, a word each, for the answers' headers. Called for each request. */
  readonly degraded?: () => readonly string[];
  /** For /health: what some worker holds is guessed. An answer's header says it where that answer's worker was chosen by it. */
  readonly guesses?: () => boolean;
  /** Prefill and decode apart, for pods with OpenAI's API. Without it by its defaults. */
  readonly pods?: PodHandOff;
  /** A log line for each request: who had it, why, what was predicted and what was seen. */
  readonly logRequests?: boolean;
  /** Which requests for pods would be answered too late. Without it one of its own. */
  readonly inTime?: InTime;
  /** More of the coordinator for /health, by name. */
  readonly parts?: () => Readonly<Record<string, unknown>>;
  /** How many workers the load needs, for /admin/planner. */
  readonly plans?: () => readonly unknown[];
  /** More of the coordinator for /metrics, in Prometheus' text form. */
  readonly moreMetrics?: () => Promise<string>;
  readonly logger: Logger;
  /** How long the start waits for a worker; without one the API server opens all the same and answers 503. */
  readonly firstContactMs?: number;
  readonly limits?: Partial<ApiServerLimits>;
  /** Of the largest body that its `reader` gets: the threads have room for it, too. */
  readonly readerBodyBytes?: number | undefined;
  /** Whose threads read texts; its owner closes it. Without it the API server has its own. */
  readonly text?: TextPool;
}

/** Of the listener for probes and scrapes. */
const operationsLimits: Partial<HttpLimits> = { bodyBytes: 1 << 10, receiveMs: 10_000, connections: 256, requests: 64 };

const nothing = (): readonly string[] => [];

export interface ApiServer {
  readonly url: string;
  /** Of the listener for probes and scrapes. */
  readonly operationsUrl: string | undefined;
  /** Reads bodies for pods that others send, with this server's models and threads; when it has closed it reads none. */
  readonly reader: PromptReader;
  close(): Promise<void>;
}

/** It listens, and perhaps no worker has come yet. */
export interface OpenApiServer extends ApiServer {
  /** When a model is served, or `firstContactMs` have passed. Closed when it rejects. @throws KvError MODEL (see loadTokenizer) */
  readonly served: Promise<void>;
}

/** Made, and not open yet. */
export interface ClosedApiServer {
  /** Closed again when it fails. @throws KvError LOCKED (port taken), SETUP (port not permitted) */
  open(): Promise<OpenApiServer>;
  /** `readersEnd`: until then its `reader` reads on. */
  close(readersEnd?: Promise<unknown>): Promise<void>;
}

/** @throws KvError CONFIG (beyond loopback without what it needs there, or files that cannot be used), and as `open` and `served` */
export async function startApiServer(options: ApiServerOptions): Promise<ApiServer> {
  const server = await makeApiServer(options).open();
  await server.served;
  return server;
}

/**
 * It takes tens of milliseconds of one turn: do it before anything runs that others wait for.
 * @throws KvError CONFIG: beyond loopback without what it needs there; files that cannot be used
 */
export function makeApiServer(options: ApiServerOptions): ClosedApiServer {
  const { apiKeysFile, adminKeysFile } = options;
  checkPlace(options, apiKeysFile != null);
  if (options.operations) checkPlace(options.operations, false);
  const limits = limitsOf(options.limits);
  const { logger } = options;
  const closers: (() => void)[] = [];
  const keysOf = (key: 'apiKeysFile' | 'adminKeysFile', file: string | null | undefined): ApiKeys | undefined => {
    if (file == null) return undefined;
    const keys = new ApiKeys(file, {
      key,
      onProblem: tellRenewed(logger, `API keys of ${file}`),
    });
    closers.push(() => keys.close());
    return keys;
  };
  const metrics = new RequestMetrics();
  const bodyBytes = Math.max(limits.bodyBytes, options.readerBodyBytes ?? 0);
  const text = options.text ?? new TextPool({ bodyBytes, onReread: rereadTold(metrics, logger) });
  const { engines, dispatch, degraded = nothing, guesses, media = [] } = options;
  const onWaiting = (count: number): void => metrics.expecting.set(count);
  const leftAtMs = (model?: string): number | undefined => models.leftAtMs(model);
  const expected = new Expected({ engines, awayMs: limits.absentMs, leftAtMs, onWaiting });
  const onChange = (): void => expected.changed();
  const models = new Models({ engines, text, tokenizers: options.tokenizers ?? {}, logger, onChange });
  const { answersRunning: maxRunning, heldBytes, unreadMs, tries: maxTries, retryMs: withinMs } = limits;
  const among = (model: string): ReadonlySet<string> | undefined => models.among(model);
  const { handOffs, ttftMs, pods = new PodHandOff({ dispatch, pods: engines }) } = options;
  const { inTime = new InTime() } = options;
  const place = { dispatch, engines, handOffs, among, pods, inTime, expected, tries: { maxTries, withinMs } };
  const shared = { models, place, text, degraded, media, metrics, logger };
  const { logRequests = false } = options;
  const keys = keysOf('apiKeysFile', apiKeysFile);
  const adminKeys = keysOf('adminKeysFile', adminKeysFile);
  const isAdmin = (headers: IncomingHttpHeaders): boolean => bearsKeyOf(adminKeys, headers);
  const generation = new Generation({ ...shared, maxRunning, heldBytes, unreadMs, ttftMs, logRequests, isAdmin });
  const parts = {
    models,
    engines,
    text,
    generation,
    metrics,
    workerMetrics: new SharedMetrics(engines),
    stallMs: limits.stallMs,
    degraded: () => [...degraded(), ...(guesses?.() ? ['index'] : [])],
    parts: options.parts ?? (() => ({})),
    plans: options.plans ?? (() => []),
    moreMetrics: options.moreMetrics ?? (async () => ''),
  };
  const answered = (route: string, status: number): void => metrics.requests.inc({ route, status: String(status) });
  const httpOf = (its: Place, name: string, bounds: HttpLimits, keys?: ApiKeys, adminKeys?: ApiKeys) =>
    createHttpApp({
      name,
      limits: bounds,
      callers: new Callers({
        isLocal: isLoopback(its.host),
        scheme: its.tls ? 'https' : 'http',
        isCertified: its.tls?.clientCaFile != null,
        keys,
        adminKeys,
      }),
      tls: its.tls ?? undefined,
      tlsPlace: its === options ? 'tls' : 'operations.tls',
      answered,
      logger,
    });
  const server = httpOf(options, 'API server', limits, keys, adminKeys);
  addRoutes(server.app, parts);
  let isClosing = false;
  const operations = options.operations
    ? httpOf(options.operations, 'operations', { ...limits, ...operationsLimits })
    : undefined;
  const isReady = (): boolean => !isClosing && (options.isReady?.() ?? true);
  if (operations) addOperations(operations.app, { ...parts, isReady, metricsText: () => metricsTextOf(parts) });

  const close = async (readersEnd?: Promise<unknown>): Promise<void> => {
    isClosing = true;
    expected.close();
    await Promise.all([server.close(limits.closeGraceMs, () => generation.abortAll()), readersEnd]);
    models.close();
    for (const end of closers) end();
    await operations?.close(0);
    if (!options.text) await text.close();
  };
  const serve = async (): Promise<void> => {
    try {
      await models.start(options.firstContactMs ?? 10_000);
    } catch (error) {
      await close();
      throw error;
    }
  };
  const open = async (): Promise<OpenApiServer> => {
    try {
      const operationsUrl = options.operations
        ? await operations!.listen(options.operations.host, options.operations.port, 'operations.port')
        : undefined;
      const url = await server.listen(options.host, options.port, '--port, or port in its configuration');
      const served = serve();
      served.catch(() => {}); // whoever opens it may have others to open first
      return { url, operationsUrl, reader: new PromptReader({ models, engines, text }), served, close: () => close() };
    } catch (error) {
      await close();
      throw error;
    }
  };
  return { open, close };
}

/** It counts each, and warns once. */
export function rereadTold({ rereads }: RequestMetrics, logger: Logger): (model: string, heapMiB: number) => void {
  let isTold = false;
  return (model, heapMiB) => {
    rereads.inc();
    if (!isTold)
      logger.warn(
        { model },
        `the tokenizers of all models do not fit into ${heapMiB} MiB of a thread that reads texts: ` +
          'requests wait while they are read anew; serve fewer models by one coordinator',
      );
    isTold = true;
  };
}

/** What the configuration's schema has made sure of, for whoever calls without one. @throws KvError CONFIG */
function checkPlace({ host, tls, trustedNetwork = false }: Place, hasKeys: boolean): void {
  if (isLoopback(host) || trustedNetwork || (tls && (tls.clientCaFile !== null || hasKeys))) return;
  throw new KvError(
    'CONFIG',
    `host ${host}: is not loopback; configure TLS, and keys or certificates of clients, or use 127.0.0.1`,
  );
}
