/**
 * An HTTP server in front of routes: TLS whose files are renewed, who may connect and for how long, who is answered, how many requests,
 * bodies as bytes, failures in OpenAI's shape, and an end in order.
 *
 * Invariants: every body, connection and wait is bounded; what cannot be accepted or understood costs its own connection alone. A
 * listener that is full gives up who is idle, so that nobody is kept out by connections that others only hold.
 */
import { randomUUID } from 'node:crypto';
import type { IncomingMessage, RequestListener, Server, ServerResponse } from 'node:http';
import type { Socket } from 'node:net';
import { InvariantError, KvError } from '@kvtier/errors';
import { type Logger, tellRenewed } from '@kvtier/telemetry';
import {
  closeQueuedAnswers,
  IdleConnections,
  listenFailure,
  renewedTlsServer,
  type ServerTls,
  tellUnaccepted,
} from '@kvtier/wire/http';
import fastify, {
  type FastifyError,
  type FastifyInstance,
  type FastifyReply,
  type FastifyRequest,
  type FastifyServerFactory,
} from 'fastify';
import { Bodies, Body } from './bodies.ts';
import type { Callers } from './callers.ts';
import { endedAs } from './cut-answers.ts';
import { HttpError, toHttpError } from './errors.ts';
import type { ApiServerLimits } from './limits.ts';
import { ownBound } from './own-bound.ts';

export type { ServerTls };

export type HttpLimits = Pick<
  ApiServerLimits,
  'bodyBytes' | 'receiveMs' | 'connections' | 'requests' | 'largeBodies' | 'largeBodyMs' | 'unreadMs'
>;

export interface HttpAppOptions {
  /** For log lines: "API server". */
  readonly name: string;
  readonly limits: HttpLimits;
  readonly callers: Pick<Callers, 'check'>;
  /** undefined: plain text. */
  readonly tls: ServerTls | undefined;
  /** Of its files' keys in the configuration. */
  readonly tlsPlace: string;
  /** An answer has ended, by route and status (499: its client left, 502: it had begun and was cut). */
  readonly answered: (route: string, status: number) => void;
  readonly logger: Logger;
}

export interface HttpApp {
  readonly app: FastifyInstance;
  /** `by`: what names its port, for a person. @throws KvError LOCKED (port taken), SETUP (port not permitted) */
  listen(host: string, port: number, by: string): Promise<string>;
  /** Takes no new request; running ones have until then, and are cut. With `abortAll`, which is called then, a second later. */
  close(graceMs: number, abortAll?: () => void): Promise<void>;
}

/** For an aborted answer to tell its client so. */
const cutAfterMs = 1_000;
/** For a client to say who it is. */
const handshakeMs = 10_000;
/** Of a connection without a request. */
const keepAliveMs = 72_000;
/** Of a body that needs no place among the large ones; and of all such bodies together. */
const [smallBodyBytes, smallBodiesBytes] = [64 << 10, 64 << 20];

/** No route has a schema: bodies are understood elsewhere. fastify would load compilers of them all the same, a tenth of a coordinator's start. */
const noSchema = (): never => {
  throw new InvariantError('a route has a schema; give fastify compilers of schemas');
};

/** @throws KvError CONFIG: TLS files that cannot be used */
export function createHttpApp(options: HttpAppOptions): HttpApp {
  const { tls, limits, name, logger } = options;
  const times = { handshakeTimeout: handshakeMs, requestTimeout: limits.receiveMs, keepAliveTimeout: keepAliveMs };
  const told = { place: options.tlsPlace, onProblem: tellRenewed(logger, `${name}: TLS files`) };
  const secured = tls && renewedTlsServer(tls, times, told);
  let isClosing = false;
  const app = createApp(options, secured?.create, () => isClosing);
  const idle = new IdleConnections(app.server);
  // Node would close the newcomer, and connections that say nothing would keep clients and probes out.
  app.server.on('connection', (socket: Socket) => {
    if (idle.count > limits.connections && !idle.closeOldest()) socket.destroy();
  });
  // If that should ever not hold.
  app.server.maxConnections = 2 * limits.connections;
  return {
    app,
    listen: (host, port, by) => listen(app, host, port, by, tls ? 'https' : 'http', logger),
    close: async (graceMs, abortAll) => {
      isClosing = true;
      const closed = app.close(); // takes no new request, waits for the running ones
      const grace = setTimeout(() => abortAll?.(), graceMs);
      const cut = setTimeout(() => app.server.closeAllConnections(), graceMs + (abortAll ? cutAfterMs : 0));
      const sweep = setInterval(() => idle.closeAll(), 20); // a connection that is kept alive becomes idle only after its answer
      await closed;
      clearTimeout(grace);
      clearTimeout(cut);
      clearInterval(sweep);
      secured?.close();
    },
  };
}

async function listen(
  app: FastifyInstance,
  host: string,
  port: number,
  by: string,
  scheme: string,
  logger: Logger,
): Promise<string> {
  try {
    // Of localhost fastify makes a second server, for ::1, that has none of our limits.
    const url = await app.listen({ host: host === 'localhost' ? '127.0.0.1' : host, port });
    tellUnaccepted(app.server, (fields, message) => logger.warn(fields, message));
    return url.replace(/^http:/, `${scheme}:`);
  } catch (error) {
    throw listenFailure(error, `${host}:${port}`, ` with ${by}`);
  }
}

const brokenRequests: Readonly<Record<string, string>> = {
  ERR_HTTP_REQUEST_TIMEOUT: '408 Request Timeout',
  HPE_HEADER_OVERFLOW: '431 Request Header Fields Too Large',
};

function createApp(
  { limits, callers, answered, logger }: HttpAppOptions,
  serverFactory: ((handler: RequestListener) => Server) | undefined,
  isClosing: () => boolean,
): FastifyInstance {
  /** Answers that have not ended. */
  const answers = new Set<ServerResponse>();
  const app = fastify({
    bodyLimit: limits.bodyBytes,
    requestTimeout: limits.receiveMs,
    return503OnClosing: false, // it would do so in a shape of its own, and count nothing
    schemaController: { compilersFactory: { buildValidator: noSchema, buildSerializer: noSchema } },
    ...(serverFactory && { serverFactory: serverFactory as FastifyServerFactory<Server> }),
    // A client may name its request, for its logs and ours.
    genReqId: (request: IncomingMessage) => {
      const given = request.headers['x-request-id'];
      return typeof given === 'string' && /^[\w.:-]{1,128}$/.test(given) ? given : randomUUID();
    },
    frameworkErrors: (error, _request, reply) => void sendError(reply, toHttpError(error)),
    clientErrorHandler: (error, socket) => {
      // What is written into the middle of an answer would be a part of it.
      const isAnswering = [...answers].some((answer) => answer.socket === socket && answer.headersSent);
      // Whoever failed to begin TLS reads no answer.
      const isHttp = /^(HPE|ERR_HTTP)_/.test(error.code ?? '');
      if (!isHttp || !socket.writable || isAnswering) return void socket.destroy();
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
  closeQueuedAnswers(app.server, limits.requests);
  app.addHook('onRequest', async (request, reply) => {
    // One of many that came with what cut their connection: nobody reads its answer.
    if (request.raw.socket.destroyed) return void reply.hijack();
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
    reply.raw.once('close', () => answered(route, endedAs(reply.raw, reply.raw.writableFinished && !unread)));
    // It came on a connection that an answer keeps open, or before that was closed as idle.
    if (isClosing()) return sendError(reply.header('connection', 'close'), toHttpError(closing()));
    callers.check(request.headers, route);
    if (answers.size > limits.requests) {
      throw ownBound(`${limits.requests} requests are in progress`);
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

const closing = (): KvError => new KvError('DISCONNECTED', 'the API server is closing; try again', { retry: true });

function sendError(reply: FastifyReply, failure: HttpError): FastifyReply {
  if (failure.retryAfterSeconds !== undefined) reply.header('retry-after', String(failure.retryAfterSeconds));
  if (failure.status === 401) reply.header('www-authenticate', 'Bearer');
  return reply.code(failure.status).send(failure.body);
}
