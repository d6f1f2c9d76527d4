/**
 * The cache node's end of the session link: accepts engines on a Unix socket, one session per connection.
 *
 * Invariants: only processes of this user (or root, or of a group that is named) get in; sessions, quarantined ones included, are bounded; the end of
 * a connection, however it comes, is the end of its session.
 */
import net from 'node:net';
import { KvError } from '@kvtier/errors';
import { descriptorOf } from '@kvtier/wire';
import { Connection } from './connection.ts';
import { defaultSessionLimits, type SessionLimits } from './limits.ts';
import type { SessionServerOptions } from './options.ts';
import { isSameProcess, type PeerProcess, peerProcess } from './peer-process.ts';
import { Quarantine } from './quarantine.ts';
import { SessionTurns } from './session-turns.ts';
import { listenPrivately, removeSocket } from './socket.ts';

export class SessionServer {
  readonly #options: SessionServerOptions & { readonly limits: SessionLimits };
  readonly #server: net.Server;
  readonly #quarantine: Quarantine;
  readonly #turns: SessionTurns;
  readonly #connections = new Set<Connection>();
  #socketInode = 0n;
  #onEmpty: (() => void) | undefined;

  private constructor(options: SessionServerOptions) {
    const { store, clock, log } = options;
    const limits = { ...defaultSessionLimits, ...options.limits };
    this.#options = { ...options, limits };
    this.#quarantine = new Quarantine({ clock, log, counters: store.counters, pollMs: limits.quarantinePollMs });
    this.#turns = new SessionTurns(clock, limits.turnMs);
    this.#server = net.createServer((socket) => this.#accept(socket));
  }

  /** KvError LOCKED when another node serves this socket, SETUP when it cannot be made. */
  static async listen(options: SessionServerOptions): Promise<SessionServer> {
    const server = new SessionServer(options);
    server.#socketInode = await listenPrivately(server.#server, options.socketPath, options.group ?? null);
    // One connection could not be accepted (no descriptors, no memory): the sessions that there are go on.
    server.#server.on('error', (error) => {
      options.store.counters.add('session.refused.accept');
      options.log.warn({ reason: error.message }, 'a connection could not be accepted');
    });
    return server;
  }

  get sessions(): number {
    return this.#connections.size;
  }

  get quarantined(): number {
    return this.#quarantine.size;
  }

  /** Stop accepting, end all sessions, remove the socket. Slots that copies may still use stay taken: they go with the arena. */
  async close(): Promise<void> {
    removeSocket(this.#options.socketPath, this.#socketInode);
    const closed = new Promise<void>((resolve) => this.#server.close(() => resolve()));
    const empty = new Promise<void>((resolve) => {
      this.#onEmpty = resolve;
      if (this.#connections.size === 0) resolve();
    });
    for (const connection of this.#connections) connection.destroy();
    await Promise.all([closed, empty]);
    this.#quarantine.close();
  }

  /** The new connection may be faster than the news that the old one has ended. */
  #endPrevious(session: string, peer: PeerProcess): void {
    if (this.#quarantine.lift(session, peer)) return;
    for (const connection of this.#connections) {
      if (connection.session === session && isSameProcess(connection.peer, peer)) connection.endSafely();
    }
  }

  #accept(socket: net.Socket): void {
    const { store, limits, log, peerCredentials, group = null, peerGroups = () => [] } = this.#options;
    const refuse = (why: string, fields: object): void => {
      store.counters.add(`session.refused.${why}`);
      log.warn({ why, ...fields }, 'connection refused');
      socket.on('error', () => {}); // it is being closed; there is nobody to tell
      socket.destroy();
    };
    let credentials: { pid: number; uid: number };
    let isMember = false;
    try {
      const fd = descriptorOf(socket);
      credentials = peerCredentials(fd);
      isMember = group !== null && peerGroups(fd).includes(group);
    } catch (error) {
      refuse('credentials', { reason: KvError.from(error).message });
      return;
    }
    const own = process.getuid?.() ?? 0;
    const full = this.#connections.size + this.#quarantine.size >= limits.maxSessions;
    const refusal =
      credentials.uid !== own && credentials.uid !== 0 && !isMember ? 'uid' : full ? 'too_many' : undefined;
    if (refusal !== undefined) {
      refuse(refusal, credentials);
      return;
    }
    const connection = new Connection(socket, {
      ...this.#options,
      peer: peerProcess(credentials.pid),
      quarantine: this.#quarantine,
      turns: this.#turns,
      endPrevious: (session, peer) => this.#endPrevious(session, peer),
      gauges: () => ({
        'session.open': this.#connections.size,
        'quarantine.open': this.#quarantine.size,
        ...this.#options.gauges?.(),
      }),
      onClosed: (closed) => {
        this.#connections.delete(closed);
        if (this.#connections.size === 0) this.#onEmpty?.();
      },
    });
    this.#connections.add(connection);
  }
}
