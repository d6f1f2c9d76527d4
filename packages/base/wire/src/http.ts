/**
 * What our HTTP servers have in common: TLS whose files are renewed, connections that carry no request, what a start that fails and a
 * connection that cannot be accepted are told as, and who is no program (web pages).
 */
import type { IncomingHttpHeaders, IncomingMessage, RequestListener, Server, ServerResponse } from 'node:http';
import { createServer as createTlsServer, type ServerOptions } from 'node:https';
import type { Socket } from 'node:net';
import { KvError } from '@kvtier/errors';
import { clientsOf, renewedTls, type ServerTlsFiles, type TlsServerOptions } from './tls.ts';

export { closeQueuedAnswers } from './queued-answers.ts';

export interface ServerTls extends ServerTlsFiles {
  readonly reloadMs: number;
}

/** A server that shows what the files hold now. @throws KvError CONFIG: TLS files that cannot be used */
export function renewedTlsServer(
  tls: ServerTls,
  options: ServerOptions,
  { place, onProblem }: Omit<TlsServerOptions, 'reloadMs'>,
) {
  let server: ReturnType<typeof createTlsServer> | undefined;
  const renewed = renewedTls(tls, { place, reloadMs: tls.reloadMs, onProblem });
  renewed.onRenewed = (context) => server?.setSecureContext(context);
  const create = (handler: RequestListener): Server => {
    server = createTlsServer({ ...options, ...renewed.made, ...clientsOf(tls) }, handler);
    return server;
  };
  return { create, close: () => renewed.close() };
}

/** `place`: what is configured, and how; `by`: where another port is said, " with --port". */
export function listenFailure(error: unknown, place: string, by = ''): KvError {
  const { code, message } = error as NodeJS.ErrnoException;
  if (code === 'EADDRINUSE') {
    return new KvError('LOCKED', `${place}: another process listens there; choose another port${by}`);
  }
  if (code === 'EADDRNOTAVAIL') {
    return new KvError('SETUP', `${place}: cannot listen (${code}); name an address of this machine`);
  }
  return new KvError('SETUP', `${place}: cannot listen (${code ?? message}); choose a port above 1023${by}`);
}

/** Between two lines that say the same. */
const refusalLineMs = 10_000;

/** One connection could not be accepted (no descriptors, no memory): those that there are go on. */
export function tellUnaccepted(server: Server, warn: (fields: object, message: string) => void): void {
  let untold = 0;
  let toldAtMs = Number.NEGATIVE_INFINITY;
  server.on('error', (error) => {
    untold++;
    if (performance.now() - toldAtMs < refusalLineMs) return;
    toldAtMs = performance.now();
    warn({ reason: error.message, connections: untold }, 'connections could not be accepted');
    untold = 0;
  });
}

/**
 * Connections, and which of them carry no request in progress, the longest idle first. Node's closeIdleConnections leaves those that never
 * carried one, which clients open ahead of need. Of TLS a connection is known before its handshake, by other sockets.
 */
export class IdleConnections {
  /** By addresses; in the order in which they were last idle. */
  readonly #open = new Map<string, { readonly socket: Socket; requests: number }>();

  constructor(server: Server) {
    const idOf = ({ remoteAddress, remotePort, localPort }: Socket): string =>
      `${remoteAddress} ${remotePort} ${localPort}`;
    server.on('connection', (socket: Socket) => {
      const id = idOf(socket);
      this.#open.set(id, { socket, requests: 0 });
      socket.once('close', () => this.#open.delete(id));
    });
    server.on('request', ({ socket }: IncomingMessage, response: ServerResponse) => {
      const id = idOf(socket);
      const connection = this.#open.get(id);
      if (connection === undefined) return; // it has ended
      connection.requests++;
      response.once('close', () => {
        connection.requests--;
        if (this.#open.get(id) !== connection) return;
        this.#open.delete(id);
        this.#open.set(id, connection);
      });
    });
  }

  /** All that are open, idle or not. */
  get count(): number {
    return this.#open.size;
  }

  /** false: none is idle. */
  closeOldest(): boolean {
    for (const { socket, requests } of this.#open.values()) {
      if (requests > 0 || socket.destroyed) continue;
      socket.destroy();
      return true;
    }
    return false;
  }

  closeAll(): void {
    for (const { socket, requests } of this.#open.values()) if (requests === 0) socket.destroy();
  }

  /** Also those with a request in progress. */
  cutAll(): void {
    for (const { socket } of this.#open.values()) socket.destroy();
  }
}

const ownName = /^(127\.\d+\.\d+\.\d+|localhost|\[::1\])$/;
/** Of a page that the server itself served, and of an address that the user typed. */
const ownSites = new Set(['same-origin', 'none']);

export interface OriginProblem {
  readonly code: 'host_not_allowed' | 'cross_site';
  readonly message: string;
}

/**
 * Web pages are not answered: a browser carries their requests here from anywhere. On loopback a name that is not this machine's (DNS
 * rebinding makes a page's own name point to 127.0.0.1) is refused, and everywhere what a browser says comes from another site. Programs
 * send neither header, or the right ones. Decides on the head alone. undefined: nothing is wrong.
 */
export function originProblem(
  { host, origin, ...headers }: IncomingHttpHeaders,
  isLocal: boolean,
  scheme: 'http' | 'https',
): OriginProblem | undefined {
  // Without a Host (HTTP/1.0) it is no browser.
  if (isLocal && host !== undefined && !ownName.test(host.replace(/:\d*$/, '').toLowerCase())) {
    const message = `Host '${clip(host)}' is not this server's; ask 127.0.0.1 or localhost. A proxy has to set Host so.`;
    return { code: 'host_not_allowed', message };
  }
  const site = headers['sec-fetch-site'];
  const isForeign = site !== undefined && !ownSites.has(String(site));
  if (!isForeign && (origin === undefined || origin === `${scheme}://${host}`)) return undefined;
  const message = `Requests of web pages of other sites (${clip(origin ?? String(site))}) are not answered.`;
  return { code: 'cross_site', message };
}

const clip = (text: string): string => text.slice(0, 200);
