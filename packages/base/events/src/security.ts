/**
 * Where a publisher may listen, and to whom it talks. Loopback and Unix sockets need nothing; anything beyond is refused
 * unless CURVE is configured, or the network is said to be trusted. The server's key authenticates us and encrypts, the list of client
 * keys says who may read.
 * The client keys are checked by ZeroMQ's authentication protocol (ZAP, rfc.zeromq.org/spec/27) inside our own context.
 */
import { isCurveKey, z85Decode } from '@kvtier/config/curve';
import { isLoopbackHost, type Openness, unbindable } from '@kvtier/config/endpoint';
import { KvError } from '@kvtier/errors';
import { type Context, Reply, type Socket } from 'zeromq';

/** Keys are Z85 text of 40 characters, as `curveKeyPair()` and `zmq.curve_keypair()` make them. They may be others later. */
export interface CurveServer {
  readonly secretKey: string;
  /** Public keys of those who may subscribe; looked at when somebody connects. */
  readonly allowedClientKeys: readonly string[];
  /** To be told when the secret key is another one. */
  onRenewed?(listener: () => void): void;
}

/** Looked at for each new socket. */
export interface CurveClient {
  /** The publisher's public key. */
  readonly serverKey: string;
  readonly publicKey: string;
  readonly secretKey: string;
}

/** `endpoint` as ZeroMQ binds it. Throws KvError CONFIG when it cannot be, or may not be open to others. */
export function bindableEndpoint(endpoint: string, option: string, openness: Openness): string {
  const why = unbindable(endpoint, openness);
  if (why !== undefined) throw new KvError('CONFIG', `${option} ${endpoint}: ${why}`);
  return endpoint.replace(/^tcp:\/\/localhost:/, 'tcp://127.0.0.1:');
}

/** A Unix socket, or loopback: who connects to it speaks to this host. Of ZeroMQ's "tcp://SOURCE;DESTINATION" the first is our own end. */
export function isLocalEndpoint(endpoint: string): boolean {
  const host = /^tcp:\/\/(\[[^\]]+\]|[^:;]+):\d+$/.exec(endpoint)?.[1];
  return /^(ipc|inproc):\/\//.test(endpoint) || (host !== undefined && isLoopbackHost(host));
}

/** vLLM's rule: every data-parallel rank has a port (or a path) of its own, `rank` after the first one. */
export function endpointOfRank(endpoint: string, rank: number): string {
  if (rank === 0) return endpoint;
  if (endpoint.startsWith('ipc://')) return `${endpoint}_dp${rank}`;
  return endpoint.replace(/:(\d+)$/, (_, port: string) => `:${Number(port) + rank}`);
}

/** Throws KvError CONFIG for keys that cannot be. Names the option, never the key. */
export function checkCurveServer({ secretKey, allowedClientKeys }: CurveServer): void {
  if (!isCurveKey(secretKey)) throw badKey('curve.secretKey');
  if (allowedClientKeys.length === 0)
    throw new KvError('CONFIG', 'curve.allowedClientKeys: empty, so nobody could subscribe; list the public keys');
  allowedClientKeys.forEach((key, i) => {
    if (!isCurveKey(key)) throw badKey(`curve.allowedClientKeys[${i}]`);
  });
}

/** The same for the keys of a subscriber. */
export function checkCurveClient(curve: CurveClient): void {
  for (const name of ['serverKey', 'publicKey', 'secretKey'] as const)
    if (!isCurveKey(curve[name])) throw badKey(`curve.${name}`);
}

export function applyCurveClient(socket: Socket, curve: CurveClient | null): void {
  if (curve === null) return;
  checkCurveClient(curve);
  socket.curveServerKey = curve.serverKey;
  socket.curvePublicKey = curve.publicKey;
  socket.curveSecretKey = curve.secretKey;
}

const badKey = (option: string): KvError =>
  new KvError('CONFIG', `${option}: not a CURVE key; a key is 40 characters of Z85, see docs/operating.md`);

/** Makes `socket` a CURVE server whose clients the authenticator of its context decides about. */
export function applyCurveServer(socket: Socket, curve: CurveServer | null): void {
  if (curve === null) return;
  socket.curveServer = true;
  socket.curveSecretKey = curve.secretKey;
  socket.zapDomain = 'kvtier';
}

/** Answers, within one context, which client keys may connect. Bound before any socket that it guards. */
export class Authenticator {
  readonly #socket: Reply;
  readonly #curve: CurveServer;
  /** Of the list of keys that `#digits` were made of. */
  #listed: readonly string[] = [];
  #digits: ReadonlySet<string> = new Set();
  readonly #loop: Promise<void>;
  #refused = 0;

  private constructor(socket: Reply, curve: CurveServer) {
    this.#socket = socket;
    this.#curve = curve;
    this.#loop = this.#run();
  }

  static async start(context: Context, curve: CurveServer): Promise<Authenticator> {
    const socket = new Reply({ context, linger: 0 });
    await socket.bind('inproc://zeromq.zap.01');
    return new Authenticator(socket, curve);
  }

  /** Connections refused so far. */
  get refused(): number {
    return this.#refused;
  }

  async #run(): Promise<void> {
    for await (const [version, id, , , , mechanism, key] of this.#socket) {
      const known = mechanism?.toString() === 'CURVE' && key !== undefined && this.#isAllowed(key);
      if (!known) this.#refused++;
      await this.#socket.send([version!, id!, ...(known ? ['200', 'OK'] : ['400', 'unknown client key']), '', '']);
    }
  }

  #isAllowed(key: Buffer): boolean {
    const { allowedClientKeys } = this.#curve;
    if (allowedClientKeys !== this.#listed) {
      this.#listed = allowedClientKeys;
      this.#digits = new Set(allowedClientKeys.map((each) => z85Decode(each).toString('hex')));
    }
    return this.#digits.has(key.toString('hex'));
  }

  async close(): Promise<void> {
    this.#socket.close();
    await this.#loop.catch(() => undefined); // ends because the socket closed
  }
}
