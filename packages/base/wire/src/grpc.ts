/**
 * gRPC, for what crosses hosts and for administration (never KV bytes, never the session link): start and stop a
 * server, and carry a KvError through a status without losing its code.
 *
 * Invariants: a Unix socket is mode 0600 from its first instant, in a folder that is its owner's alone, and its client asks whose
 * process serves it; a socket that a live server answers on is never replaced (LOCKED), one that a dead server left behind is. Every status that we send carries the whole KvFailure in
 * the metadata key `kvtier-failure-bin`; a status from elsewhere maps to the nearest code.
 */
import { chmodSync, linkSync, lstatSync, mkdtempSync, rmSync, unlinkSync } from 'node:fs';
import { createConnection } from 'node:net';
import { dirname, join } from 'node:path';
import {
  type ChannelOptions,
  type handleUnaryCall,
  logVerbosity,
  Metadata,
  makeGenericClientConstructor,
  Server,
  ServerCredentials,
  type ServiceError,
  setLogVerbosity,
  status,
} from '@grpc/grpc-js';
import { KvError, type KvErrorCode } from '@kvtier/errors';
import { isLocal, type TlsFiles } from './client-credentials.ts';
import { fromFailure, toFailure } from './failure.ts';
import { decodeOrder, encodeOrder } from './generate-order.ts';
import * as engine from './generated/kvtier/v1/engine.ts';
import { KvFailure } from './generated/kvtier/v1/errors.ts';
import { checkSocketFolder } from './private-socket.ts';

export { clientCredentials, isLocal, type TlsFiles } from './client-credentials.ts';
export { fromFailure, toFailure } from './failure.ts';
export * from './generated/kvtier/v1/engine.ts';
export { KvFailure } from './generated/kvtier/v1/errors.ts';
export { resetCall } from './reset-call.ts';
export { TlsServerCredentials } from './server-tls.ts';
export type { ServerTlsFiles } from './tls.ts';

/** The generated service, but for how long prompts are written and read (generate-order.ts). */
export const EngineService = {
  ...engine.EngineService,
  generateMany: {
    ...engine.EngineService.generateMany,
    requestSerialize: encodeOrder,
    requestDeserialize: decodeOrder,
  },
};
export type EngineClient = engine.EngineClient;
export const EngineClient = makeGenericClientConstructor(
  EngineService,
  engine.EngineClient.serviceName,
) as unknown as typeof engine.EngineClient;

/** For connections that were cut to be gone. */
const cutMs = 500;

/** Prompts travel as token ids: a million of them fit. */
const maxMessageBytes = 8 << 20;
const probeTimeoutMs = 1_000;
const failureKey = 'kvtier-failure-bin';

// Whatever the library would print reaches us as an error as well, and is reported there, once and in our words.
setLogVerbosity(logVerbosity.NONE);

export const channelOptions: ChannelOptions = {
  'grpc.max_receive_message_length': maxMessageBytes,
  'grpc.max_send_message_length': maxMessageBytes,
  // A restarted worker is found again within a second.
  'grpc.initial_reconnect_backoff_ms': 50,
  'grpc.max_reconnect_backoff_ms': 1_000,
};

/** The `deadline` of a call that may take `ms` milliseconds from now. */
export const deadlineAfter = (ms: number): Date => new Date(Date.now() + ms);

export interface RunningGrpcServer {
  /** As given, with the port that was chosen for port 0. */
  readonly address: string;
  /** Ends new calls, gives running ones `graceMs` to finish, then cuts them. */
  close(graceMs?: number): Promise<void>;
}

export interface GrpcServerOptions {
  /** Only clients whose certificate is of `tls.ca` get in. */
  readonly tls?: TlsFiles | undefined;
  /** What else keeps strangers out; absent, and without `tls`: plain text, for a Unix socket or loopback. */
  readonly credentials?: ServerCredentials | undefined;
  /** Over `channelOptions`. */
  readonly channel?: ChannelOptions;
}

/**
 * Serve `addServices` at "unix:/path" or "host:port". With `tls` only clients whose certificate is of `tls.ca` get in.
 * @throws KvError LOCKED when a live server holds the address, SETUP for a folder of others, IO when the system refuses it, CONFIG
 * for an address beyond loopback without `tls` or `credentials`
 */
export async function startGrpcServer(
  address: string,
  addServices: (server: Server) => void,
  { tls, credentials = serverCredentials(tls), channel = {} }: GrpcServerOptions = {},
): Promise<RunningGrpcServer> {
  if (!tls && credentials === undefined && !isLocal(address))
    throw new KvError('CONFIG', `${address}: is beyond loopback; configure TLS there, or listen on 127.0.0.1`);
  const server = new Server({ ...channelOptions, ...channel });
  addServices(server);
  const path = address.startsWith('unix:') ? address.slice('unix:'.length) : undefined;
  let port = 0;
  let inode: bigint | undefined;
  try {
    if (path === undefined) port = await bind(server, address, credentials ?? ServerCredentials.createInsecure());
    else inode = await bindPrivately(server, path);
  } catch (error) {
    server.forceShutdown();
    if (error instanceof KvError) throw error;
    const message = (error as Error).message;
    if (message.includes('EADDRINUSE') || (error as NodeJS.ErrnoException).code === 'EEXIST') {
      throw new KvError('LOCKED', `${address}: already in use by another process; choose another address or stop it`);
    }
    throw new KvError('IO', `${address}: cannot listen (${message}); check the folder, its permissions and the port`);
  }
  return {
    address: path === undefined ? address.replace(/:0$/, `:${port}`) : address,
    close: (graceMs = 1_000) =>
      new Promise((resolve) => {
        if (path !== undefined) removeSocket(path, inode!);
        let timer = setTimeout(() => {
          server.forceShutdown();
          // A stream that was reset while it began may never be told of (seen with grpc-js 1.14): nothing is waited for after that.
          timer = setTimeout(resolve, cutMs);
        }, graceMs);
        server.tryShutdown(() => {
          clearTimeout(timer);
          resolve();
        });
      }),
  };
}

const serverCredentials = (tls: TlsFiles | undefined): ServerCredentials | undefined =>
  tls && ServerCredentials.createSsl(tls.ca, [{ cert_chain: tls.cert, private_key: tls.key }], true);

function bind(server: Server, address: string, credentials: ServerCredentials): Promise<number> {
  return new Promise((resolve, reject) =>
    server.bindAsync(address, credentials, (error, bound) => (error ? reject(error) : resolve(bound))),
  );
}

/**
 * The library binds in a later turn, so no umask could be meant for it alone. It binds in a new folder of mode 0700, where nobody
 * else can connect; when the socket is 0600 it gets its name, which fails if somebody else has taken that. Returns its inode.
 */
async function bindPrivately(server: Server, path: string): Promise<bigint> {
  checkSocketFolder(path);
  await replaceStaleSocket(path);
  // Within the socket's folder: the one above may be another user's. (`join` would drop the dot.)
  const folder = mkdtempSync(`${dirname(path)}/.`);
  try {
    const born = join(folder, 's');
    await bind(server, `unix:${born}`, ServerCredentials.createInsecure());
    chmodSync(born, 0o600);
    linkSync(born, path);
    return lstatSync(path, { bigint: true }).ino;
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}

/** Our socket file, and not the one that a successor has put there. */
function removeSocket(path: string, inode: bigint): void {
  if (lstatSync(path, { bigint: true, throwIfNoEntry: false })?.ino === inode) rmSync(path, { force: true });
}

async function replaceStaleSocket(path: string): Promise<void> {
  const file = lstatSync(path, { throwIfNoEntry: false });
  if (file === undefined) return;
  // Connecting to a file is refused like connecting to a dead process's socket.
  if (!file.isSocket()) throw new KvError('SETUP', `${path}: is there, and is no socket; choose another address`);
  const socket = createConnection(path);
  const outcome = await new Promise<string>((resolve) => {
    socket.setTimeout(probeTimeoutMs, () => resolve('live')); // its backlog is full: somebody is there
    socket.once('connect', () => resolve('live'));
    socket.once('error', (error: NodeJS.ErrnoException) => resolve(error.code ?? 'unknown'));
  });
  socket.destroy();
  if (outcome === 'live') {
    throw new KvError('LOCKED', `${path}: another process serves this socket; stop it or choose another address`);
  }
  if (outcome !== 'ECONNREFUSED') return; // nothing there; what is wrong otherwise, listening will say
  unlinkSync(path);
}

const statusOf: Readonly<Record<KvErrorCode, status>> = {
  CONFIG: status.FAILED_PRECONDITION,
  MODEL: status.FAILED_PRECONDITION,
  REQUEST: status.INVALID_ARGUMENT,
  TOO_LONG: status.OUT_OF_RANGE,
  CANCELLED: status.CANCELLED,
  BUSY: status.RESOURCE_EXHAUSTED,
  DEADLINE: status.DEADLINE_EXCEEDED,
  CAPACITY: status.RESOURCE_EXHAUSTED,
  CORRUPT: status.DATA_LOSS,
  IO: status.INTERNAL,
  LOCKED: status.ABORTED,
  PROTOCOL: status.UNIMPLEMENTED,
  DISCONNECTED: status.UNAVAILABLE,
  GPU: status.UNAVAILABLE,
  SETUP: status.FAILED_PRECONDITION,
};

const codeOf: Partial<Record<status, KvErrorCode>> = {
  [status.INVALID_ARGUMENT]: 'REQUEST',
  [status.OUT_OF_RANGE]: 'TOO_LONG',
  [status.CANCELLED]: 'CANCELLED',
  [status.RESOURCE_EXHAUSTED]: 'BUSY',
  [status.DEADLINE_EXCEEDED]: 'DEADLINE',
  [status.DATA_LOSS]: 'CORRUPT',
  [status.ABORTED]: 'LOCKED',
  [status.UNIMPLEMENTED]: 'PROTOCOL',
  [status.UNAVAILABLE]: 'DISCONNECTED',
  [status.FAILED_PRECONDITION]: 'SETUP',
};

/** Any thrown value as the status that a gRPC handler answers with. */
export function toStatus(thrown: unknown): Pick<ServiceError, 'code' | 'details' | 'metadata'> {
  const failure = toFailure(thrown);
  const metadata = new Metadata();
  metadata.set(failureKey, Buffer.from(KvFailure.encode(failure).finish()));
  return { code: statusOf[failure.code as KvErrorCode], details: failure.message, metadata };
}

/** The error of a gRPC call as a KvError. */
export function fromStatus(error: unknown): KvError {
  if (error instanceof KvError) return error;
  const { code, details, metadata } = error as Partial<ServiceError>;
  if (code === undefined) return KvError.from(error);
  const packed = metadata?.get(failureKey)[0];
  if (Buffer.isBuffer(packed)) {
    try {
      return fromFailure(KvFailure.decode(packed));
    } catch {
      // not ours after all: the status itself still says something
    }
  }
  const retry = code === status.UNAVAILABLE || code === status.RESOURCE_EXHAUSTED;
  return new KvError(codeOf[code] ?? 'IO', details || status[code] || 'unknown status', { retry, cause: error });
}

/** A unary handler out of an async function; whatever it throws becomes a status. */
export function unary<Request, Response>(
  handle: (request: Request) => Promise<Response> | Response,
): handleUnaryCall<Request, Response> {
  return (call, callback) => {
    Promise.resolve()
      .then(() => handle(call.request))
      .then(
        (response) => callback(null, response),
        (error: unknown) => callback(toStatus(error)),
      );
  };
}
