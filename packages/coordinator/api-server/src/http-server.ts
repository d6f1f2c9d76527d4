/**
 * The HTTP server in front of the routes: who may connect and for how long, how many requests, bodies as bytes, failures in OpenAI's shape.
 *
 * Invariants: every body, connection and wait is bounded; what cannot be accepted or understood costs its own connection alone.
 */
import { randomUUID } from 'node:crypto';
import type { IncomingMessage, ServerResponse } from 'node:http';
import type { Socket } from 'node:net';
import { KvError } from '@kvtier/errors';
import type { Logger } from '@kvtier/telemetry';
import fastify, { type FastifyError, type FastifyInstance, type FastifyReply, type FastifyRequest } from 'fastify';
import { Bodies, Body } from './bodies.ts';
import { HttpError, toHttpError } from './errors.ts';
import type { ApiServerLimits } from './limits.ts';
import type { RequestMetrics } from './metrics.ts';
import { checkOrigin } from './origin.ts';

/** Of a body that needs no place among the large ones; and of all such bodies together. */
const [smallBodyBytes, smallBodiesBytes] = [64 << 10, 64 << 20];

/** Between two lines that say the same. */
const refusalLineMs = 10_000;

export async function listen(app: FastifyInstance, host: string, port: number, logger: Logger): Promise<string> {
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
export function trackConnections(app: FastifyInstance): () => void {
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

export function createApp(limits: ApiServerLimits, metrics: RequestMetrics, logger: Logger): FastifyInstance {
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
