/**
 * What a node gives to its peers: it tells each of them, over a control connection, what its arena and the tier below hold, and
 * sends them the blocks that they ask for over data connections.
 *
 * Invariants: a block that is being sent is pinned, or lies in a slot of its own, until the last byte went out; slots lent to
 * reads from below are bounded, and who finds none waits in a line; who does not prove itself is told nothing, and costs a bounded wait.
 */
import { Buffer } from 'node:buffer';
import { randomBytes } from 'node:crypto';
import { createServer, type Server, type Socket } from 'node:net';
import { createServer as createTlsServer } from 'node:tls';
import { type ArenaHandle, native } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';
import { type HashKey, headerBytes, type Namespace, namespaceFromDigest } from '@kvtier/identity';
import type { Log } from '@kvtier/runtime';
import type { ArenaTier } from '../arena/arena-tier.ts';
import { identitiesOf } from '../disk/disk-io.ts';
import { Slices } from '../kit/slices.ts';
import type { Tier } from '../kit/tier.ts';
import { Announcer } from './announcer.ts';
import { type Control, greet, type PeerSecurity, sessionBytes } from './control.ts';
import { maxHashes } from './frames.ts';
import type { PeerLoops, PeerRequest } from './peer-loops.ts';
import { ReadsBelow } from './reads-below.ts';
import { Strangers } from './strangers.ts';

export interface PeerServerOptions {
  readonly loops: PeerLoops;
  readonly arena: ArenaHandle;
  readonly slots: ArenaTier;
  /** What is given besides the arena's blocks: the tier of this node's own disk. */
  readonly below?: Tier | undefined;
  readonly security: PeerSecurity;
  /** IP address; beyond loopback only with TLS, or where the network is declared trusted. */
  readonly host: string;
  /** Of control connections; 0 takes a free one. */
  readonly port: number;
  readonly dataPort: number;
  readonly epoch: bigint;
  readonly log: Log;
  readonly heartbeatMs?: number;
  /** Control connections of peers at a time. */
  readonly maxPeers?: number;
  /** Beside them, those that have not proved themselves yet. */
  readonly maxStrangers?: number;
  /** Slots of the arena that may be lent to reads from below; an eighth of the arena where that is less. */
  readonly maxLentBytes?: number;
  /** This node reads the block from below itself: fulfilled when that has ended. undefined: it does not. */
  readonly arriving?: ((namespace: Namespace, hash: HashKey) => Promise<void> | undefined) | undefined;
  /** At the peer somebody has shown the ticket of a pin that a session of this node may have. */
  readonly endPin?: ((namespace: Namespace, ticket: Buffer) => void) | undefined;
}

const defaultHeartbeatMs = 1000;
/** All other members that a cluster can have (`maxMembers`): where prefill nodes are few, each node chooses all of them. */
export const mostServed = 1_024;
/** A node that gives and says nothing for so many heartbeats is left alone by who fetches from it. */
export const silentHeartbeats = 5;
/** One that fetches costs little: it may stand still for longer before it is told all anew. */
const patientHeartbeats = 30;

/** Strangers may come as often as they like: one line of the log in so long, the next says how many had none. */
const refusalLineMs = 10_000;

export class PeerServer {
  readonly #options: PeerServerOptions;
  readonly #server: Server;
  readonly #controls = new Set<Control>();
  readonly #strangers: Strangers;
  readonly #below: ReadsBelow;
  readonly #heartbeatMs: number;
  /** What is told, and what is heard: all peers share each turn. */
  readonly #telling = new Slices();
  readonly #hearing = new Slices();
  #reading = 0;
  /** Blocks that a peer calls corrupt, to be looked at; what does not fit is looked at when it is asked for again. */
  readonly #suspects: { readonly namespace: Namespace; readonly hash: HashKey }[] = [];
  #looking = false;
  #lastLineMs = Number.NEGATIVE_INFINITY;
  #unlogged = 0;
  #dataPort = 0;
  readonly counts = { peers: 0, refused: 0, sentBlocks: 0, sentBytes: 0, declined: 0, corrupt: 0, unknown: 0 };

  /** Listens on both ports. KvError CONFIG or IO when it cannot. */
  static async open(options: PeerServerOptions): Promise<PeerServer> {
    const server = new PeerServer(options);
    const { loops, host, port, dataPort } = options;
    try {
      server.#dataPort = loops.listen(host, dataPort, (requests) => server.#serve(requests));
      await new Promise<void>((resolve, reject) => {
        server.#server.once('error', reject);
        server.#server.listen({ host, port }, resolve);
      });
      // One connection could not be accepted (no descriptors, no memory): the peers that there are stay.
      server.#server.on('error', (error) => server.#refused({}, error));
    } catch (error) {
      const { code, message } = KvError.from(error);
      throw new KvError(code, `peers: ${host}:${port}: cannot listen (${message}); choose another address or port`);
    }
    return server;
  }

  private constructor(options: PeerServerOptions) {
    this.#options = options;
    this.#heartbeatMs = options.heartbeatMs ?? defaultHeartbeatMs;
    const { arena, slots, below, arriving, security, maxStrangers = 128, maxLentBytes = 256 << 20 } = options;
    this.#below = new ReadsBelow({
      ...{ arena, slots, below, arriving },
      maxLentBytes: Math.min(maxLentBytes, Math.floor(slots.stats().capacityBytes / 8)),
      send: (...of) => this.#send(...of),
      decline: (...of) => this.#decline(...of),
      serveAnew: (...of) => this.#serve(...of),
    });
    this.#strangers = new Strangers(maxStrangers);
    const onSocket = (socket: Socket): void => {
      void this.#welcome(socket).catch((error: unknown) => this.#refused(socket, error));
    };
    if (security.encryption === 'tls') {
      const files = () => {
        const { cert, key, ca } = security;
        return { cert, key, ca, minVersion: 'TLSv1.3' as const };
      };
      const asked = { requestCert: true, rejectUnauthorized: true, handshakeTimeout: 5000 };
      const server = createTlsServer({ ...files(), ...asked }, onSocket);
      security.onRenewed?.(() => server.setSecureContext(files()));
      server.on('tlsClientError', (error, socket) => {
        this.#refused(socket, error);
        socket.destroy();
      });
      this.#server = server;
    } else this.#server = createServer(onSocket);
    this.#server.on('connection', (socket: Socket) => this.#strangers.add(socket));
  }

  get port(): number {
    return (this.#server.address() as { port: number }).port;
  }

  get dataPort(): number {
    return this.#dataPort;
  }

  /** Connections of peers that were turned away, control and data. */
  get refusedCount(): number {
    return this.counts.refused + Object.values(this.#options.loops.refused).reduce((sum, count) => sum + count, 0);
  }

  async close(): Promise<void> {
    const ended = new Promise<void>((resolve) => this.#server.close(() => resolve()));
    for (const control of this.#controls) control.end(new KvError('DISCONNECTED', 'peer: this node is closing'));
    this.#strangers.end();
    this.#below.end();
    await ended;
    // Reads from below end within their tier's limit; what is being sent ends with its session.
    while (this.#reading > 0) await new Promise((resolve) => setTimeout(resolve, 5));
  }

  #refused(socket: Socket | { remoteAddress?: string | undefined }, error: unknown): void {
    this.counts.refused++;
    const nowMs = performance.now();
    if (nowMs - this.#lastLineMs < refusalLineMs) {
      this.#unlogged++;
      return;
    }
    const reason = KvError.from(error, 'PROTOCOL').message;
    const fields = { from: socket.remoteAddress, reason, unlogged: this.#unlogged };
    this.#options.log.warn(fields, 'a connection to the peers port was refused');
    this.#lastLineMs = nowMs;
    this.#unlogged = 0;
  }

  async #welcome(socket: Socket): Promise<void> {
    const { security, epoch, loops, log } = this.#options;
    const track = (control: Control): void => {
      this.#controls.add(control);
      control.onEnd(() => this.#controls.delete(control));
    };
    const { control, dataKey, peerEpoch } = await greet(socket, security, epoch, this.#hearing, track);
    this.#strangers.remove(socket);
    if (this.counts.peers >= (this.#options.maxPeers ?? mostServed)) {
      const error = new KvError('BUSY', 'peer: more peers than this node serves; name it at fewer nodes');
      control.end(error);
      throw error;
    }
    const session = randomBytes(sessionBytes);
    loops.allow(session, dataKey);
    this.counts.peers++;
    control.send({ kind: 'welcome', session, dataPort: this.#dataPort, heartbeatMs: this.#heartbeatMs });
    const announcer = new Announcer(control, this.#telling, this.#options.slots, this.#options.below);
    let silent = 0;
    const heartbeat = setInterval(() => {
      control.send({ kind: 'ping' });
      if (++silent <= patientHeartbeats) return;
      control.end(new KvError('DEADLINE', 'peer: nothing heard of it; see whether that node hangs'));
    }, this.#heartbeatMs);
    control.onEnd((error) => {
      clearInterval(heartbeat);
      announcer.end();
      loops.revoke(session);
      this.counts.peers--;
      log.info({ reason: error.message }, 'a peer left');
    });
    control.listen((message) => {
      silent = 0;
      if (message.kind === 'hint') this.#hinted(message.what, message.namespace, message.hashes);
      else if (message.kind === 'endPin') this.#options.endPin?.(message.namespace, message.ticket);
      else if (message.kind === 'unknown') this.counts.unknown++;
      else if (message.kind !== 'pong') {
        control.end(new KvError('PROTOCOL', 'peer: a message that only a server sends; run nodes of one version'));
      }
    });
    log.info({ from: socket.remoteAddress, epoch: peerEpoch.toString(16) }, 'a peer came');
  }

  /** `hasWaited`: they come from the line, and stand before those in it. */
  #serve(requests: readonly PeerRequest[], hasWaited = false): void {
    const { slots } = this.#options;
    const deeper = new Map<string, { namespace: Namespace; wanted: Parameters<ReadsBelow['serve']>[1][number][] }>();
    let namespace: Namespace | undefined;
    for (const request of requests) {
      // Requests of one read come together.
      if (namespace?.key !== request.namespaceKey) {
        namespace = namespaceFromDigest(Buffer.from(request.namespaceKey, 'latin1'));
      }
      const space = namespace;
      const hash = hashOf(request.hash, (key) => slots.get(space, key) !== undefined);
      const block = slots.get(namespace, hash);
      if (block === undefined) {
        const group = deeper.get(namespace.key) ?? { namespace, wanted: [] };
        group.wanted.push({ request, nameOf: (known) => hashOf(hash, known) });
        deeper.set(namespace.key, group);
      } else if (headerBytes + block.payloadBytes > request.slotBytes) this.#decline(request, 'missing');
      else {
        slots.pin(space, hash);
        this.#send(request, block.slot, headerBytes + block.payloadBytes, () => slots.unpin(space, hash));
      }
    }
    for (const { namespace, wanted } of deeper.values()) {
      this.#reading++;
      void this.#below.serve(namespace, wanted, hasWaited).finally(() => this.#reading--);
    }
  }

  #send(request: PeerRequest, slot: number, objectBytes: number, onSent: () => void): void {
    this.counts.sentBlocks++;
    this.counts.sentBytes += objectBytes;
    this.#options.loops.send(request, slot, objectBytes, onSent);
  }

  #decline(request: PeerRequest, why: 'missing' | 'failed'): void {
    this.counts.declined++;
    this.#options.loops.decline(request, why);
  }

  /** A peer used blocks of ours, or says that one is corrupt: then we look ourselves, one after another. */
  #hinted(what: 'used' | 'corrupt', namespace: Namespace, hashes: readonly HashKey[]): void {
    const { slots, below } = this.#options;
    if (what === 'used') {
      slots.touch(namespace, hashes);
      below?.touch(namespace, hashes);
      return;
    }
    const room = maxHashes - this.#suspects.length;
    this.#suspects.push(...hashes.slice(0, room).map((hash) => ({ namespace, hash })));
    if (this.#looking) return;
    this.#looking = true;
    this.#reading++;
    void this.#lookAtSuspects().finally(() => {
      this.#looking = false;
      this.#reading--;
    });
  }

  /** Removes those that are corrupt indeed, in the arena and below. */
  async #lookAtSuspects(): Promise<void> {
    const { slots, arena } = this.#options;
    for (let next = this.#suspects.shift(); next !== undefined; next = this.#suspects.shift()) {
      const { namespace, hash } = next;
      const block = slots.get(namespace, hash);
      if (block !== undefined) {
        slots.pin(namespace, hash);
        const bytes = Float64Array.of(headerBytes + block.payloadBytes);
        const identity = identitiesOf(namespace, [hash]);
        const [fault] = await native.arenaVerify(arena, Float64Array.of(block.slot), bytes, identity);
        if (fault !== 0 && slots.remove(namespace, [hash], 'corrupt') === 1) this.counts.corrupt++;
        slots.unpin(namespace, hash);
      }
      await this.#below.verify(namespace, hash, () => this.counts.corrupt++);
    }
  }
}

const padding = '\0'.repeat(16);

/** A hash of 16 bytes travels zero padded like one of 32: it is the short one if only that is known. */
function hashOf(padded: string, known: (key: HashKey) => boolean): HashKey {
  const long = padded as HashKey;
  if (!padded.endsWith(padding)) return long;
  const short = padded.slice(0, 16) as HashKey;
  return !known(long) && known(short) ? short : long;
}
