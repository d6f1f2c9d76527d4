/**
 * Connections that move whole values in native code: `BulkEngine` has the thread, a `BulkLane` is one connection, which a `BulkPool`
 * treats as it treats a `BulkConnection` of Node's. A job is a few values, told of together. Used where a server is reached by plain TCP or a Unix socket. Invariant: once
 * `destroy` has returned, nothing reads or writes any slot for it any more, and every job has ended.
 */
import { lookup } from 'node:dns';
import { isIP } from 'node:net';
import { KvError } from '@kvtier/errors';
import { type ArenaHandle, type BulkHandle, native } from '@kvtier/native';
import { type BulkAddress, type BulkLogin, type BulkResult, loginOf } from './bulk-connection.ts';

/** What became of a value. 'fault': it has arrived, and is not the object that it should be. */
export type ValueEnd = Exclude<BulkResult, 'lost'> | 'fault';

/** Values between their slots and their parts; `onDone` is called exactly once, for all of them. */
export interface ValueJob {
  readonly kind: 'get' | 'set';
  /** What its parts' keys begin with, "kvtier:{p0}:v:", before the value's id and ":0", ":1" ... */
  readonly base: string;
  /** With a space between them. */
  readonly ids: string;
  /** Rows of 3: slot, bytes, partBytes. */
  readonly rows: Float64Array;
  /** Get: what each must be, 64 bytes a value. */
  readonly identities: Uint8Array | null;
  /** On the clock of performance.now(). */
  readonly deadlineMs: number;
  readonly onDone: (ends: 'lost' | readonly ValueEnd[]) => void;
}

/** The same numbers in packages/native/cc/bulk_engine.h. */
const event = { ready: 0, down: 1, moved: 2 } as const;
const ends = ['ok', 'none', 'length', 'fault'] as const;
/** What one answer of a server carries at most: what it holds up the commands of others for. */
export const pieceBytes = 128 << 10;

export class BulkEngine {
  readonly #handle: BulkHandle;
  readonly #lanes = new Map<number, { ready(): void; down(reason: string): void }>();
  readonly #jobs = new Map<number, (ends: readonly ValueEnd[]) => void>();
  #nextTag = 1;

  constructor(arena: ArenaHandle) {
    this.#handle = native.bulkOpen(arena, (kind, number, results, text) => {
      if (kind === event.moved) this.#jobs.get(number)?.(endsOf(results, text));
      else if (kind === event.ready) this.#lanes.get(number)?.ready();
      else this.#lanes.get(number)?.down(text);
    });
  }

  /** `host`: an IP address, or a path. Returns the connection's number. KvError. */
  connect(
    host: string,
    port: number,
    login: { text: Buffer; replies: number },
    depth: number,
    on: { ready(): void; down(reason: string): void },
  ): number {
    try {
      const { text, replies } = login;
      const number = native.bulkConnect(this.#handle, host, port, text, replies, depth, pieceBytes);
      this.#lanes.set(number, on);
      return number;
    } catch (error) {
      throw KvError.from(error);
    }
  }

  /** Returns the job's tag, until it ends. */
  move(connection: number, job: ValueJob): number {
    const tag = this.#nextTag++;
    this.#jobs.set(tag, (all) => {
      this.#jobs.delete(tag);
      job.onDone(all);
    });
    const { base, ids, rows, identities } = job;
    native.bulkMove(this.#handle, connection, tag, base, ids, rows, identities);
    return tag;
  }

  /** Nothing moves over it any more; these jobs are the caller's to end. */
  disconnect(connection: number, tags: Iterable<number>): void {
    if (this.#lanes.delete(connection)) native.bulkDisconnect(this.#handle, connection);
    for (const tag of tags) this.#jobs.delete(tag);
  }

  close(): void {
    native.bulkClose(this.#handle);
  }
}

function endsOf(results: string, text: string): ValueEnd[] {
  const lines = text === '' ? [] : text.split('\n');
  let next = 0;
  return Array.from(results, (digit) => ends[Number(digit)] ?? { error: lines[next++]! });
}

export class BulkLane {
  readonly #engine: BulkEngine;
  readonly #login: BulkLogin;
  readonly #depth: number;
  readonly #onReady: () => void;
  readonly #onEnd: (reason: string, wasReady: boolean) => void;
  readonly #connectTimer: NodeJS.Timeout;
  /** By tag, in the order sent. */
  readonly #jobs = new Map<number, ValueJob>();
  /** Addresses of the server's name that are still to be tried. */
  #hosts: string[] = [];
  #connection: number | undefined;
  #ready = false;
  #ended = false;

  constructor(
    engine: BulkEngine,
    address: BulkAddress,
    login: BulkLogin,
    depth: number,
    on: { ready: () => void; end: (reason: string, wasReady: boolean) => void },
  ) {
    this.#engine = engine;
    this.#login = login;
    this.#depth = depth;
    this.#onReady = on.ready;
    this.#onEnd = on.end;
    this.#connectTimer = setTimeout(() => this.destroy('no connection in time'), login.connectTimeoutMs);
    const host = address.path ?? address.host ?? '127.0.0.1';
    const port = address.port ?? 0;
    if (address.path !== undefined || isIP(host) !== 0) {
      this.#hosts = [host];
      // Not in this turn: whoever waits for it must have it first.
      queueMicrotask(() => this.#connect(port, 'no address'));
    } else {
      lookup(host, { all: true }, (error, found) => {
        this.#hosts = (found ?? []).map((each) => each.address);
        this.#connect(port, error?.message ?? `${host} has no address`);
      });
    }
  }

  get ready(): boolean {
    return this.#ready && !this.#ended;
  }

  /** Jobs sent and not ended. */
  get inFlight(): number {
    return this.#jobs.size;
  }

  /** By when the oldest job must have ended, on the clock of performance.now(). */
  get deadlineMs(): number {
    for (const { deadlineMs } of this.#jobs.values()) return deadlineMs;
    return Number.POSITIVE_INFINITY;
  }

  send(job: ValueJob): void {
    const onDone = (all: 'lost' | readonly ValueEnd[]): void => {
      this.#jobs.delete(tag);
      job.onDone(all);
      if (!this.#ended) this.#onReady();
    };
    const tag = this.#engine.move(this.#connection!, { ...job, onDone });
    this.#jobs.set(tag, job);
  }

  /** Closes the socket in this turn, so that no byte moves afterwards; then every job is 'lost'. */
  destroy(reason: string): void {
    if (this.#ended) return;
    const wasReady = this.#ready;
    this.#ended = true;
    clearTimeout(this.#connectTimer);
    const jobs = [...this.#jobs.values()];
    if (this.#connection !== undefined) this.#engine.disconnect(this.#connection, this.#jobs.keys());
    this.#jobs.clear();
    for (const job of jobs) job.onDone('lost');
    this.#onEnd(reason, wasReady);
  }

  #connect(port: number, reason: string): void {
    if (this.#ended) return;
    const host = this.#hosts.shift();
    if (host === undefined) {
      this.destroy(reason);
      return;
    }
    const ready = (): void => {
      this.#ready = true;
      clearTimeout(this.#connectTimer);
      this.#onReady();
    };
    const down = (why: string): void => {
      if (this.#ready || this.#hosts.length === 0) this.destroy(why);
      else {
        this.#engine.disconnect(this.#connection!, []);
        this.#connect(port, why);
      }
    };
    try {
      this.#connection = this.#engine.connect(host, port, loginOf(this.#login), this.#depth, { ready, down });
    } catch (error) {
      this.destroy((error as Error).message);
    }
  }
}
