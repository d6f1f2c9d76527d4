/**
 * The API server: an HTTP server on loopback with OpenAI's API in front of the workers of a cluster.
 *
 *   POST /v1/completions · POST /v1/chat/completions · GET /v1/models · GET /v1/models/{id}
 *   GET /health · GET /metrics · POST /admin/reset_prefix_cache, /admin/pin_prefix, /admin/unpin_prefix · GET /admin/planner
 *   (routes.ts)
 *
 * Invariants: it listens only on loopback; every body, connection and wait is bounded; every failure has OpenAI's
 * shape; while no worker serves, /health is 503, and it comes back by itself.
 */
import type { Dispatch } from '@kvtier/dispatch';
import { KvError } from '@kvtier/errors';
import type { HandOffs } from '@kvtier/handoff';
import { PodHandOff } from '@kvtier/pod-handoff';
import type { Logger } from '@kvtier/telemetry';
import type { Engines } from './engines.ts';
import { Expected } from './expected.ts';
import { Generation } from './generation.ts';
import { createApp, listen, trackConnections } from './http-server.ts';
import { type ApiServerLimits, defaultLimits } from './limits.ts';
import { RequestMetrics } from './metrics.ts';
import { Models } from './models.ts';
import { PromptReader } from './prompt-reader.ts';
import { addRoutes } from './routes.ts';
import { TextPool } from './text-pool.ts';

export interface ApiServerOptions {
  /** 127.0.0.1, ::1 or localhost */
  readonly host: string;
  /** 0: any free one */
  readonly port: number;
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
  /** Whose threads read texts; its owner closes it. Without it the API server has its own. */
  readonly text?: TextPool;
}

/** For an aborted answer to tell its client so. */
const cutAfterMs = 1_000;

const nothing = (): readonly string[] => [];

const loopback = new Set(['127.0.0.1', '::1', 'localhost']);

export interface ApiServer {
  readonly url: string;
  /** Reads bodies for pods that others send, with this server's models and threads; after `close` it reads none. */
  readonly reader: PromptReader;
  close(): Promise<void>;
}

/** Made, and not open yet. */
export interface ClosedApiServer {
  /** Closed again when it fails. @throws KvError LOCKED (port taken), SETUP (port not permitted), MODEL (see loadTokenizer) */
  open(): Promise<ApiServer>;
  close(): Promise<void>;
}

/** @throws KvError CONFIG (not loopback), and as `open` */
export const startApiServer = async (options: ApiServerOptions): Promise<ApiServer> => makeApiServer(options).open();

/**
 * It takes tens of milliseconds of one turn: do it before anything runs that others wait for.
 * @throws KvError CONFIG: not loopback
 */
export function makeApiServer(options: ApiServerOptions): ClosedApiServer {
  if (!loopback.has(options.host)) {
    throw new KvError(
      'CONFIG',
      `host ${options.host}: the API server has no login and listens on loopback only; use 127.0.0.1`,
    );
  }
  const limits = { ...defaultLimits, ...options.limits };
  const { logger } = options;
  const text = options.text ?? new TextPool();
  const { engines, dispatch, degraded = nothing, guesses, media = [] } = options;
  const metrics = new RequestMetrics();
  const onWaiting = (count: number): void => metrics.expecting.set(count);
  const leftAtMs = (model?: string): number | undefined => models.leftAtMs(model);
  const expected = new Expected({ engines, awayMs: limits.absentMs, leftAtMs, onWaiting });
  const onChange = (): void => expected.changed();
  const models = new Models({ engines, text, tokenizers: options.tokenizers ?? {}, logger, onChange });
  const { answersRunning: maxRunning, unreadMs, tries: maxTries, retryMs: withinMs } = limits;
  const among = (model: string): ReadonlySet<string> | undefined => models.among(model);
  const { handOffs, ttftMs, pods = new PodHandOff({ dispatch, pods: engines }) } = options;
  const place = { dispatch, engines, handOffs, among, pods, expected, tries: { maxTries, withinMs } };
  const shared = { models, place, text, degraded, media, metrics, logger };
  const generation = new Generation({ ...shared, maxRunning, unreadMs, ttftMs });
  const app = createApp(limits, metrics, logger);
  const closeIdle = trackConnections(app);
  addRoutes(app, {
    models,
    engines,
    text,
    generation,
    metrics,
    stallMs: limits.stallMs,
    degraded: () => [...degraded(), ...(guesses?.() ? ['index'] : [])],
    parts: options.parts ?? (() => ({})),
    plans: options.plans ?? (() => []),
    moreMetrics: options.moreMetrics ?? (async () => ''),
  });

  const close = async (): Promise<void> => {
    expected.close();
    const closed = app.close(); // takes no new request, waits for the running ones
    const grace = setTimeout(() => generation.abortAll(), limits.closeGraceMs);
    const cut = setTimeout(() => app.server.closeAllConnections(), limits.closeGraceMs + cutAfterMs);
    const sweep = setInterval(closeIdle, 20); // a connection that is kept alive becomes idle only after its answer
    await closed;
    clearTimeout(grace);
    clearTimeout(cut);
    clearInterval(sweep);
    models.close();
    if (!options.text) await text.close();
  };
  const open = async (): Promise<ApiServer> => {
    try {
      const url = await listen(app, options.host, options.port, logger);
      await models.start(options.firstContactMs ?? 10_000);
      return { url, reader: new PromptReader({ models, engines, text }), close };
    } catch (error) {
      await close();
      throw error;
    }
  };
  return { open, close };
}
