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
import { randomUUID } from 'node:crypto';
import type { IncomingMessage, ServerResponse } from 'node:http';
import type { Socket } from 'node:net';
import type { Dispatch } from '@kvtier/dispatch';
import { KvError } from '@kvtier/errors';
import type { HandOffs } from '@kvtier/handoff';
import { PodHandOff } from '@kvtier/pod-handoff';
import type { Logger } from '@kvtier/telemetry';
import fastify, { type FastifyError, type FastifyInstance, type FastifyReply, type FastifyRequest } from 'fastify';
import { Bodies, Body } from './bodies.ts';
import type { Engines } from './engines.ts';
import { HttpError, toHttpError } from './errors.ts';
import { Expected } from './expected.ts';
import { Generation } from './generation.ts';
import { RequestMetrics } from './metrics.ts';
import { Models } from './models.ts';
import { checkOrigin } from './origin.ts';
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

/** All the API server's limits in one place. */
export interface ApiServerLimits {
  /** A prompt of a million token ids fits. */
  readonly bodyBytes: number;
  /** For a request's head and body to arrive. */
  readonly receiveMs: number;
  readonly connections: number;
  /** In progress at once, also those that a client sends without waiting for the answer before. */
  readonly requests: number;
  /** Bodies above 64 KiB that arrive or are being read at once; the others wait. */
  readonly largeBodies: number;
  /** For its turn, of a large body; and then for the rest of it to arrive. */
  readonly largeBodyMs: number;
  /** A client that takes nothing of its answer for so long is cut off. */
  readonly unreadMs: number;
  /** Answers generated at once; the engine's own queue is shorter by default (1,024 waiting). */
  readonly answersRunning: number;
  /** Answers run and none has a token for so long: /health says 503. */
  readonly stallMs: number;
  /** Workers that may fail one after another with one answer, without a token between them. */
  readonly tries: number;
  /** From a worker's failure on, another one is looked for so long. */
  readonly retryMs: number;
  /** While nobody is ready, a request waits for a worker that went away, or is looked for, since less; 0: it fails at once. */
  readonly absentMs: number;
  /** What running answers get at close before they are cut. */
  readonly closeGraceMs: number;
}

const defaultLimits: ApiServerLimits = {
  bodyBytes: 16 << 20,
  receiveMs: 60_000,
  connections: 4_096,
  requests: 4_096,
  largeBodies: 16,
  largeBodyMs: 20_000,
  unreadMs: 60_000,
  answersRunning: 2_048,
  stallMs: 120_000,
  tries: 5,
  retryMs: 10_000,
  absentMs: 3_000,
  closeGraceMs: 2_000,
};

/** For an aborted answer to tell its client so. */
const cutAfterMs = 1_000;

/** Of a body that needs no place among the large ones; and of all such bodies together. */
const [smallBodyBytes, smallBodiesBytes] = [64 << 10, 64 << 20];

/** Between two lines that say the same. */
const refusalLineMs = 10_000;

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

async function listen(app: FastifyInstance, host: string, port: number, logger: Logger): Promise<string> {
  try {
    // Of localhost fastify makes a second server, for ::1, that has none of our limits.
    const url = await app.listen({ host: host === 'localhost' ? '127.0.0.1' : host, port });
    let untold = 0;
    let toldAtMs = Number.NEGATIVE_INFINITY;
    // One connection could not be accepted (no descriptors, no memory): those that there are go on.
    app.server.on('error', (error) => {
      untold++;
      if (performance.now() - toldAtMs < refusalLineMs) return;
      toldAtMs = performance.now();
      logger.warn({ reason: error.message, connections: untold }, 'connections could not be accepted');
      untold = 0;
    });
    return url;
  } catch (error) {
    const { code, message } = error as NodeJS.ErrnoException;
    if (code === 'EADDRINUSE') {
      throw new KvError('LOCKED', `${host}:${port}: another process listens there; choose another port with --port`);
    }
    throw new KvError(
      'SETUP',
      `${host}:${port}: cannot listen (${code ?? message}); choose a port above 1023 with --port`,
    );
  }
}

/**
 * Returns what closes every connection without a request in progress. Node's closeIdleConnections leaves those that
 * never carried one, which clients open ahead of need.
 */
function trackConnections(app: FastifyInstance): () => void {
  const idle = new Set<Socket>();
  app.server.on('connection', (socket: Socket) => {
    idle.add(socket);
    socket.once('close', () => idle.delete(socket));
  });
  app.server.on('request', ({ socket }: IncomingMessage, response: ServerResponse) => {
    idle.delete(socket);
    response.once('close', () => {
      if (!socket.destroyed) idle.add(socket);
    });
  });
  return () => {
    for (const socket of idle) socket.destroy();
  };
}

const brokenRequests: Readonly<Record<string, string>> = {
  ERR_HTTP_REQUEST_TIMEOUT: '408 Request Timeout',
  HPE_HEADER_OVERFLOW: '431 Request Header Fields Too Large',
};

function createApp(limits: ApiServerLimits, metrics: RequestMetrics, logger: Logger): FastifyInstance {
  /** Answers that have not ended. */
  const answers = new Set<ServerResponse>();
  const app = fastify({
    bodyLimit: limits.bodyBytes,
    requestTimeout: limits.receiveMs,
    // A client may name its request, for its logs and ours.
    genReqId: (request: IncomingMessage) => {
      const given = request.headers['x-request-id'];
      return typeof given === 'string' && /^[\w.:-]{1,128}$/.test(given) ? given : randomUUID();
    },
    frameworkErrors: (error, _request, reply) => void sendError(reply, toHttpError(error)),
    clientErrorHandler: (error, socket) => {
      // What is written into the middle of an answer would be a part of it.
      const isAnswering = [...answers].some((answer) => answer.socket === socket && answer.headersSent);
      if (error.code === 'ECONNRESET' || !socket.writable || isAnswering) return void socket.destroy();
      const status = brokenRequests[error.code ?? ''] ?? '400 Bad Request';
      const { body } = new HttpError(400, `Not a complete HTTP request (${error.code}).`, { code: 'invalid_http' });
      const text = JSON.stringify(body);
      socket.end(
        `HTTP/1.1 ${status}\r\ncontent-type: application/json\r\ncontent-length: ${Buffer.byteLength(text)}\r\n` +
          `connection: close\r\n\r\n${text}`,
      );
    },
  });
  const bodies = new Bodies({
    maxBytes: limits.bodyBytes,
    smallBytes: smallBodyBytes,
    smallTotalBytes: smallBodiesBytes,
    places: limits.largeBodies,
    waitMs: limits.largeBodyMs,
    receiveMs: limits.largeBodyMs,
  });
  // JSON alone: a web page's plain form must not reach the engine. Its bytes are counted here and read elsewhere.
  app.removeAllContentTypeParsers();
  app.addContentTypeParser('application/json', async (_request: FastifyRequest, payload: IncomingMessage) => {
    const body = await bodies.receive(payload);
    if (payload.socket.destroyed) body.drop(); // the hook below has run
    return body;
  });
  app.server.maxConnections = limits.connections;
  app.addHook('onRequest', async (request, reply) => {
    reply.header('x-request-id', request.id);
    answers.add(reply.raw);
    reply.raw.once('close', () => {
      answers.delete(reply.raw);
      if (request.body instanceof Body) request.body.drop();
    });
    // The answer is complete, and goes as fast as the client takes it: the socket's timeout sees whether any of it goes.
    let unread = false;
    reply.raw.once('prefinish', () =>
      reply.raw.setTimeout(limits.unreadMs, () => {
        unread = true;
        reply.raw.destroy();
      }),
    );
    const route = request.routeOptions.url ?? 'unknown';
    // 'close' comes after every answer, and alone when the client left before it was complete.
    reply.raw.once('close', () => {
      const complete = reply.raw.writableFinished && !unread;
      metrics.requests.inc({ route, status: String(complete ? reply.raw.statusCode : 499) });
    });
    checkOrigin(request.headers);
    if (answers.size > limits.requests) {
      throw new KvError('BUSY', `the API server: ${limits.requests} requests are in progress; try again later`);
    }
  });
  app.setNotFoundHandler((request, reply) =>
    sendError(
      reply,
      new HttpError(404, `Unknown request: ${request.method} ${request.url.slice(0, 200)}.`, { code: 'unknown_url' }),
    ),
  );
  app.setErrorHandler((error: FastifyError, request, reply) => {
    const failure = toHttpError(error);
    // What is left of the body is not wanted.
    if (!request.raw.complete) reply.header('connection', 'close');
    if (failure.body.error.code === 'internal_error')
      logger.error({ request: request.id, err: error }, 'request failed');
    else if (failure.status >= 500) logger.warn({ request: request.id }, failure.message);
    return sendError(reply, failure);
  });
  return app;
}

function sendError(reply: FastifyReply, failure: HttpError): FastifyReply {
  if (failure.retryAfterSeconds !== undefined) reply.header('retry-after', String(failure.retryAfterSeconds));
  return reply.code(failure.status).send(failure.body);
}
