/**
 * What the machinery around a node asks, on an HTTP listener of its own; nothing listens unless configured:
 *
 *   GET /health/live · GET /health/ready · GET /metrics
 *
 * Live is whoever answers: the event loop turns. Ready is who takes sessions; else the answer says why not.
 *
 * Invariants: beyond loopback it listens only with TLS and clients' certificates, or where the network is said to be trusted. Whoever asks
 * costs the node next to nothing: no body is read, figures are read and nothing is computed, at most four times a second; every head,
 * connection and wait is bounded. A listener that is full gives up who is idle, so that no probe fails because others hold connections.
 */
import { createServer, type IncomingMessage, type Server, type ServerOptions, type ServerResponse } from 'node:http';
import type { AddressInfo, Socket } from 'node:net';
import { setImmediate } from 'node:timers/promises';
import { isLoopback } from '@kvtier/config';
import { KvError } from '@kvtier/errors';
import type { Clock, Log } from '@kvtier/runtime';
import { tellRenewed } from '@kvtier/telemetry';
import { type NodeFigures, nodeMetricsPieces } from '@kvtier/telemetry/node-metrics';
import {
  closeQueuedAnswers,
  IdleConnections,
  listenFailure,
  originProblem,
  renewedTlsServer,
  type ServerTls,
  tellUnaccepted,
} from '@kvtier/wire/http';

export interface OperationsOptions {
  /** An IP address, or localhost. */
  readonly host: string;
  /** 0: any free one. */
  readonly port: number;
  /** null: plain text. */
  readonly tls?: ServerTls | null;
  /** Of a network beyond loopback. */
  readonly trustedNetwork?: boolean;
}

export interface OperationsParts {
  /** Why no sessions are taken; undefined: they are. */
  readonly whyNotReady: () => string | undefined;
  readonly figures: () => NodeFigures;
  readonly clock: Clock;
  readonly log: Log;
  readonly limits?: Partial<OperationsLimits>;
}

export interface OperationsLimits {
  readonly connections: number;
  /** In progress at once, also those that a client sends without waiting for the answer before; whoever sends more is cut off. */
  readonly requests: number;
  readonly headBytes: number;
  /** For a request's head to arrive, and for its answer to be taken. */
  readonly receiveMs: number;
  readonly answerMs: number;
  /** Of a connection between two requests. */
  readonly keepAliveMs: number;
  /** So old may figures be. */
  readonly figuresMs: number;
}

const defaultLimits: OperationsLimits = {
  connections: 256,
  requests: 64,
  headBytes: 8 << 10,
  receiveMs: 10_000,
  answerMs: 10_000,
  keepAliveMs: 72_000,
  figuresMs: 250,
};

const metricsType = 'text/plain; version=0.0.4; charset=utf-8';

interface Answer {
  readonly status: number;
  readonly type: string;
  /** In pieces: to join many tenants' megabytes takes a turn of its own, and each answer would. */
  readonly body: readonly Buffer[];
}

export class OperationsServer {
  readonly #parts: OperationsParts;
  readonly #limits: OperationsLimits;
  readonly #origin: readonly [isLocal: boolean, scheme: 'http' | 'https'];
  readonly #server: Server;
  readonly #connections: IdleConnections;
  readonly #endTls: () => void;
  readonly #answers: Readonly<Record<string, () => Answer | Promise<Answer>>> = {
    '/health/live': () => json(200, { status: 'ok' }),
    '/health/ready': () => {
      const why = this.#parts.whyNotReady();
      return why === undefined ? json(200, { status: 'ok' }) : json(503, { status: 'unavailable', why });
    },
    '/metrics': async () => ({ status: 200, type: metricsType, body: await this.#metrics() }),
  };
  #running = 0;
  /** For all who ask at about the same time. */
  #told: { readonly atUs: number; readonly text: Promise<readonly Buffer[]> } | undefined;
  url = '';

  private constructor({ host, tls, trustedNetwork = false }: OperationsOptions, parts: OperationsParts) {
    if (!isLoopback(host) && !trustedNetwork && (!tls || tls.clientCaFile === null)) {
      const remedy = 'configure TLS and the scrapers’ authority, or use 127.0.0.1';
      throw new KvError('CONFIG', `operations.host: ${host} is not loopback; ${remedy}`);
    }
    const limits = { ...defaultLimits, ...parts.limits };
    this.#parts = parts;
    this.#limits = limits;
    this.#origin = [isLoopback(host), tls ? 'https' : 'http'];
    const times: ServerOptions = {
      requestTimeout: limits.receiveMs,
      headersTimeout: limits.receiveMs,
      connectionsCheckingInterval: Math.min(1_000, limits.receiveMs),
      keepAliveTimeout: limits.keepAliveMs,
      maxHeaderSize: limits.headBytes,
    };
    const handler = (request: IncomingMessage, response: ServerResponse): void => this.#receive(request, response);
    const onProblem = tellRenewed({ info: this.#line('info'), warn: this.#line('warn') }, 'operations: TLS files');
    const told = { place: 'operations.tls', onProblem };
    const secured = tls && renewedTlsServer(tls, { ...times, handshakeTimeout: limits.receiveMs }, told);
    this.#endTls = () => secured?.close();
    this.#server = secured ? secured.create(handler) : createServer(times, handler);
    // Whoever waits for a word before he sends his body gets the answer instead.
    this.#server.on('checkContinue', (request, response) => this.#server.emit('request', request, response));
    closeQueuedAnswers(this.#server, limits.requests);
    this.#connections = new IdleConnections(this.#server);
    this.#server.on('connection', (socket: Socket) => {
      if (this.#connections.count > limits.connections && !this.#connections.closeOldest()) socket.destroy();
    });
  }

  /** @throws KvError CONFIG (beyond loopback without what it needs there, unusable TLS files), LOCKED (port taken), SETUP */
  static async open(options: OperationsOptions, parts: OperationsParts): Promise<OperationsServer> {
    const { host, port } = options;
    const opened = new OperationsServer(options, parts);
    const server = opened.#server;
    try {
      await new Promise<void>((resolve, reject) => {
        server.once('error', reject);
        server.listen({ host: host === 'localhost' ? '127.0.0.1' : host, port }, resolve);
      });
    } catch (error) {
      opened.#endTls();
      const { code } = error as NodeJS.ErrnoException;
      const key = code === 'EADDRNOTAVAIL' ? 'operations.host' : 'operations.port';
      throw listenFailure(error, `${key}: ${host}:${port}`);
    }
    server.removeAllListeners('error');
    tellUnaccepted(server, (fields, message) => parts.log.warn(fields, `operations: ${message}`));
    const { address, port: taken, family } = server.address() as AddressInfo;
    opened.url = `${opened.#origin[1]}://${family === 'IPv6' ? `[${address}]` : address}:${taken}`;
    return opened;
  }

  /** At once: nobody's answer is worth waiting for. */
  async close(): Promise<void> {
    this.#endTls();
    const closed = new Promise<void>((resolve) => this.#server.close(() => resolve()));
    this.#connections.cutAll();
    await closed;
  }

  #receive(request: IncomingMessage, response: ServerResponse): void {
    if (this.#running >= this.#limits.requests) {
      request.socket.destroy();
      return;
    }
    this.#running++;
    const late = setTimeout(() => request.socket.destroy(), this.#limits.answerMs);
    response.once('close', () => {
      this.#running--;
      clearTimeout(late);
    });
    void this.#answer(request).then((answer) => this.#send(request, response, answer));
  }

  #send(request: IncomingMessage, response: ServerResponse, { status, type, body }: Answer): void {
    if (status === 405) response.setHeader('allow', 'GET, HEAD');
    // What is left of a body is not wanted.
    if (hasBody(request)) response.setHeader('connection', 'close');
    const bytes = body.reduce((sum, piece) => sum + piece.length, 0);
    response.writeHead(status, { 'content-type': type, 'content-length': bytes, 'cache-control': 'no-store' });
    response.cork();
    for (const piece of body) response.write(piece);
    response.end();
  }

  async #answer({ headers, method = '', url = '' }: IncomingMessage): Promise<Answer> {
    const problem = originProblem(headers, ...this.#origin);
    if (problem !== undefined) return failure(403, problem.code, problem.message);
    const path = url.split('?', 1)[0]!;
    const answer = Object.hasOwn(this.#answers, path) ? this.#answers[path] : undefined;
    if (answer === undefined) {
      return failure(404, 'unknown_url', `Unknown request: ${method} ${path.slice(0, 200)}.`);
    }
    if (method !== 'GET' && method !== 'HEAD') {
      return failure(405, 'method_not_allowed', `${path} is asked by GET, not by ${method}.`);
    }
    try {
      return await answer();
    } catch (error) {
      this.#parts.log.error({ err: error, path }, 'operations: a request failed');
      return failure(500, 'internal_error', 'The node failed on this request; its log says why.');
    }
  }

  #metrics(): Promise<readonly Buffer[]> {
    const nowUs = this.#parts.clock.nowUs();
    if (this.#told === undefined || nowUs - this.#told.atUs >= this.#limits.figuresMs * 1_000) {
      this.#told = { atUs: nowUs, text: this.#write() };
    }
    return this.#told.text;
  }

  async #write(): Promise<readonly Buffer[]> {
    const pieces: Buffer[] = [];
    for (const piece of nodeMetricsPieces(this.#parts.figures())) {
      pieces.push(Buffer.from(piece));
      await setImmediate();
    }
    return pieces;
  }

  #line =
    (level: 'info' | 'warn') =>
    (line: string): void =>
      this.#parts.log[level]({}, line);
}

/** Of the head: whether more follows it. */
const hasBody = ({ headers }: IncomingMessage): boolean =>
  headers['transfer-encoding'] !== undefined || (headers['content-length'] ?? '0') !== '0';

const json = (status: number, value: object): Answer => ({
  status,
  type: 'application/json; charset=utf-8',
  body: [Buffer.from(JSON.stringify(value))],
});

const failure = (status: number, code: string, message: string): Answer => json(status, { error: { message, code } });
