/**
 * The native peer data plane with callbacks: connections, fetches into slots, and the requests of peers. One per node, shared
 * by its `PeerTier` (what we fetch) and its `PeerServer` (what we send). Invariant: a fetch ends exactly once, and so does an
 * answer that lent a slot.
 */
import type { Buffer } from 'node:buffer';
import { invariant } from '@kvtier/errors';
import { type ArenaHandle, native, type PeerHandle } from '@kvtier/native';

/** The same numbers in packages/native/cc/peer_engine.h. */
const event = { fetched: 0, request: 1, sent: 2, up: 3, down: 4, refused: 5 } as const;
export const fetchResults = ['ready', 'missing', 'failed', 'corrupt'] as const;
export type FetchResult = (typeof fetchResults)[number];
export const ends = ['ended', 'unauthenticated', 'protocol', 'time limit', 'too many'] as const;
export type ConnectionEnd = (typeof ends)[number];
const identityBytes = 64;

export interface FetchRow {
  readonly slot: number;
  readonly slotBytes: number;
  readonly limitMs: number;
  readonly onDone: (result: FetchResult) => void;
}

/** What a peer asks for: the object of this identity (namespace digest, hash zero padded), if it fits into `slotBytes`. */
export interface PeerRequest {
  readonly token: number;
  readonly connection: number;
  readonly slotBytes: number;
  readonly identity: Buffer;
}

export interface ConnectionWatcher {
  onUp(): void;
  onDown(end: ConnectionEnd): void;
}

export interface PeerEngineOptions {
  readonly arena: ArenaHandle;
  /** TLS 1.3 on data connections. */
  readonly tls: boolean;
  readonly threads: number;
  /** Data connections that peers may open. */
  readonly maxConnections: number;
  readonly stallMs: number;
}

export class PeerEngine {
  readonly #handle: PeerHandle;
  readonly #fetches = new Map<number, (result: FetchResult) => void>();
  readonly #lent = new Map<number, () => void>();
  readonly #watchers = new Map<number, ConnectionWatcher>();
  /** Connections of peers that were ended because they broke the rules, by why. */
  readonly refused: Record<ConnectionEnd, number> = {
    ended: 0,
    unauthenticated: 0,
    protocol: 0,
    'time limit': 0,
    'too many': 0,
  };
  #onRequests: ((requests: readonly PeerRequest[]) => void) | undefined;
  /** Rows for native.peerAnswer, gathered for a turn. */
  #answers: number[] = [];
  #nextTag = 1;
  #closed = false;

  constructor(options: PeerEngineOptions) {
    const { arena, tls, threads, maxConnections, stallMs } = options;
    this.#handle = native.peerOpen(arena, { threads, tls, maxConnections, stallMs }, (rows, identities) =>
      this.#deliver(rows, identities),
    );
  }

  /** Listen for peers' data connections; returns the port. KvError-to-be IO when the address cannot be had. */
  listen(host: string, port: number, onRequests: (requests: readonly PeerRequest[]) => void): number {
    this.#onRequests = onRequests;
    return native.peerListen(this.#handle, host, port);
  }

  allow(session: Uint8Array, key: Uint8Array): void {
    if (!this.#closed) native.peerAllow(this.#handle, session, key);
  }

  revoke(session: Uint8Array): void {
    if (!this.#closed) native.peerRevoke(this.#handle, session);
  }

  connect(host: string, port: number, session: Uint8Array, key: Uint8Array, watcher: ConnectionWatcher): number {
    const connection = native.peerConnect(this.#handle, host, port, session, key);
    this.#watchers.set(connection, watcher);
    return connection;
  }

  disconnect(connection: number): void {
    if (!this.#closed) native.peerDisconnect(this.#handle, connection);
  }

  fetch(connection: number, rows: readonly FetchRow[], identities: Buffer): void {
    const numbers = new Float64Array(rows.length * 4);
    for (let i = 0; i < rows.length; i++) {
      const { slot, slotBytes, limitMs, onDone } = rows[i]!;
      const tag = this.#nextTag++;
      this.#fetches.set(tag, onDone);
      numbers[i * 4] = tag;
      numbers[i * 4 + 1] = slot;
      numbers[i * 4 + 2] = slotBytes;
      numbers[i * 4 + 3] = limitMs;
    }
    native.peerFetch(this.#handle, connection, numbers, identities);
  }

  /** Send what lies in `slot`; `onSent` gives the slot back, whatever became of it. */
  send(request: PeerRequest, slot: number, objectBytes: number, onSent: () => void): void {
    if (this.#closed) {
      onSent();
      return;
    }
    this.#lent.set(request.token, onSent);
    this.#answer(request.token, request.connection, 0, slot, objectBytes);
  }

  decline(request: PeerRequest, why: 'missing' | 'failed'): void {
    if (this.#closed) return;
    const status = why === 'missing' ? 1 : 2;
    this.#answer(request.token, request.connection, status, 0, 0);
  }

  async close(): Promise<void> {
    if (this.#closed) return;
    this.#closed = true;
    await native.peerClose(this.#handle);
    invariant(this.#fetches.size === 0, 'peer: a fetch never ended');
  }

  #answer(...row: readonly [number, number, number, number, number]): void {
    if (this.#answers.length === 0) queueMicrotask(() => this.#flush());
    this.#answers.push(...row);
  }

  #flush(): void {
    const rows = Float64Array.from(this.#answers);
    this.#answers = [];
    if (!this.#closed) {
      native.peerAnswer(this.#handle, rows);
      return;
    }
    for (let at = 0; at < rows.length; at += 5) {
      const onSent = this.#lent.get(rows[at]!);
      this.#lent.delete(rows[at]!);
      onSent?.();
    }
  }

  #deliver(rows: Float64Array, identities: Buffer): void {
    const requests: PeerRequest[] = [];
    for (let at = 0; at < rows.length; at += 4) {
      const kind = rows[at]!;
      const [first, second] = [rows[at + 1]!, rows[at + 2]!];
      if (kind === event.fetched) {
        const onDone = this.#fetches.get(first);
        invariant(onDone !== undefined, 'peer: a fetch ended twice');
        this.#fetches.delete(first);
        onDone(fetchResults[second]!);
      } else if (kind === event.request) {
        const begin = requests.length * identityBytes;
        const identity = identities.subarray(begin, begin + identityBytes);
        requests.push({ token: first, connection: second, slotBytes: rows[at + 3]!, identity });
      } else if (kind === event.sent) {
        const onSent = this.#lent.get(first);
        invariant(onSent !== undefined, 'peer: a slot was given back twice');
        this.#lent.delete(first);
        onSent();
      } else if (kind === event.up) this.#watchers.get(first)?.onUp();
      else if (kind === event.down) {
        const watcher = this.#watchers.get(first);
        this.#watchers.delete(first);
        watcher?.onDown(ends[second]!);
      } else this.refused[ends[second]!]++;
    }
    if (requests.length > 0 && !this.#closed) this.#onRequests?.(requests);
  }
}
