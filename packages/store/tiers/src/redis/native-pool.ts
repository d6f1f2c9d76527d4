/**
 * Connections that move whole values in native code, where a server is reached by plain TCP or a Unix socket: `ValueMover` has the
 * thread, `NativePool` are the connections to one server. Values wait in one queue there, and whichever connection has room takes the next.
 * A job is a few values, told of together. Reads go before writes. Invariants: once `close` has returned, nothing reads or writes any
 * slot for them any more, and every job has ended; a job ends by its deadline (and a sweep).
 */
import { lookup } from 'node:dns';
import { isIP } from 'node:net';
import { type ArenaHandle, native, type ValuesHandle } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';
import type { RedisAddress, RedisLogin } from '@kvtier/redis';
import { OthersWatch } from './other-users.ts';
import { loginOf, type MoveResult } from './piece-connection.ts';

/** What became of a value. 'fault': it has arrived, and is not the object that it should be; 'foreign': it is sound, and a newer program's. */
export type ValueEnd = MoveResult | 'fault' | 'foreign';

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

/** The same numbers in packages/base/data-plane/cc/value_mover.h. */
const event = { ready: 0, down: 1, moved: 2 } as const;
const refused = 4;
const ends = ['ok', 'none', 'length', 'fault', 'refused', 'lost', 'foreign'] as const;
/** What one answer of a server carries at first, and over TLS: what it holds up the commands of others for. */
export const pieceBytes = 128 << 10;
const sweepMs = 50;

interface ConnectionEvents {
  ready(): void;
  down(reason: string): void;
}

export class ValueMover {
  readonly #handle: ValuesHandle;
  readonly #natives = new Map<number, ConnectionEvents>();
  readonly #jobs = new Map<number, (ends: readonly ValueEnd[]) => void>();
  #nextTag = 1;

  constructor(arena: ArenaHandle) {
    this.#handle = native.valuesOpen(arena, (kind, number, results, text) => {
      if (kind === event.moved) this.#jobs.get(number)?.(endsOf(results, text));
      else if (kind === event.ready) this.#natives.get(number)?.ready();
      else this.#natives.get(number)?.down(text);
    });
  }

  /** Returns the number of a server that is reached so. `depth`: commands in flight on a connection. */
  open(login: RedisLogin, depth: number): number {
    const { text, replies } = loginOf(login);
    return native.valuesServer(this.#handle, text, replies, depth, pieceBytes);
  }

  /** `host`: an IP address, or a path. Returns the connection's number. KvError. */
  connect(server: number, host: string, port: number, on: ConnectionEvents): number {
    try {
      const number = native.valuesConnect(this.#handle, server, host, port);
      this.#natives.set(number, on);
      return number;
    } catch (error) {
      throw KvError.from(error);
    }
  }

  /** Returns the job's tag, until it ends. */
  move(server: number, job: ValueJob, onEnd: (ends: readonly ValueEnd[]) => void): number {
    const tag = this.#nextTag++;
    native.valuesMove(this.#handle, server, tag, job.base, job.ids, job.rows, job.identities);
    // Its end comes in a turn of its own.
    this.#jobs.set(tag, (all) => {
      this.#jobs.delete(tag);
      onEnd(all);
    });
    return tag;
  }

  /** Whether others use that server, too; at first they do. */
  share(server: number, isShared: boolean): void {
    native.valuesShare(this.#handle, server, isShared);
  }

  /** The job ends soon: what is left of it is lost, with the connections that carry it. */
  expire(server: number, tag: number): void {
    native.valuesExpire(this.#handle, server, tag);
  }

  /** Nothing moves over it any more. */
  disconnect(connection: number): void {
    if (this.#natives.delete(connection)) native.valuesDisconnect(this.#handle, connection);
  }

  /** Nothing moves to or from it any more; these jobs are the caller's to end. */
  shut(server: number, tags: Iterable<number>): void {
    native.valuesShut(this.#handle, server);
    for (const tag of tags) this.#jobs.delete(tag);
  }

  close(): void {
    native.valuesClose(this.#handle);
  }
}

function endsOf(results: string, text: string): ValueEnd[] {
  const lines = text === '' ? [] : text.split('\n');
  let next = 0;
  return Array.from(results, (digit) => {
    const end = ends[Number(digit)]!;
    return end === ends[refused] ? { error: lines[next++]! } : end;
  });
}

export interface NativePoolOptions {
  readonly address: RedisAddress;
  readonly login: RedisLogin;
  readonly connections: number;
  /** Commands in flight on one connection. */
  readonly depth: number;
  /** A connection could not be made, or broke. */
  readonly onFailure: (reason: string) => void;
  /** Commands that others have sent to this server so far: while none come, what is read comes in large pieces. */
  readonly foreignCalls: () => Promise<number>;
}

export class NativePool {
  readonly #mover: ValueMover;
  readonly #options: NativePoolOptions;
  readonly #server: number;
  readonly #natives = new Set<NativeConnection>();
  /** By tag, in the order given: that of their deadlines. */
  readonly #jobs = new Map<number, ValueJob>();
  readonly #others: OthersWatch;
  #sweep: NodeJS.Timeout | undefined;
  #closed = false;

  constructor(mover: ValueMover, options: NativePoolOptions) {
    this.#mover = mover;
    this.#options = options;
    this.#server = mover.open(options.login, options.depth);
    this.#others = new OthersWatch(options.foreignCalls, (areHere) => mover.share(this.#server, areHere));
  }

  submit(job: ValueJob): void {
    if (this.#closed) {
      job.onDone('lost');
      return;
    }
    const tag = this.#mover.move(this.#server, job, (all) => {
      this.#jobs.delete(tag);
      job.onDone(all);
    });
    this.#jobs.set(tag, job);
    if (job.kind === 'get') this.#others.start();
    this.#sweep ??= setInterval(() => this.#expire(), sweepMs);
    this.#connect();
  }

  /** What its connections begin with. */
  get login(): RedisLogin {
    return this.#options.login;
  }

  /** Nothing waits or moves. */
  get idle(): boolean {
    return this.#jobs.size === 0;
  }

  /** Every connection is closed and every job 'lost' when this returns. */
  close(reason: string): void {
    if (this.#closed) return;
    this.#closed = true;
    clearInterval(this.#sweep);
    this.#others.stop();
    this.#mover.shut(this.#server, this.#jobs.keys());
    for (const connection of [...this.#natives]) connection.destroy(reason);
    const jobs = [...this.#jobs.values()];
    this.#jobs.clear();
    for (const job of jobs) job.onDone('lost');
  }

  /** One at a time, as long as there is something to carry. */
  #connect(): void {
    const { address, login, connections, onFailure } = this.#options;
    if (this.#closed || this.#jobs.size === 0 || this.#natives.size >= connections) return;
    for (const { ready } of this.#natives) if (!ready) return;
    const connection: NativeConnection = new NativeConnection(
      this.#mover,
      this.#server,
      address,
      login.connectTimeoutMs,
      {
        ready: () => this.#connect(),
        end: (reason, wasReady) => {
          this.#natives.delete(connection);
          if (this.#closed) return;
          // Without any connection, and none to be had, nothing that waits can be served.
          if (!wasReady && this.#natives.size === 0)
            for (const tag of this.#jobs.keys()) this.#mover.expire(this.#server, tag);
          onFailure(reason);
          if (wasReady) this.#connect(); // else a server that takes no more connections would be asked without a pause
        },
      },
    );
    this.#natives.add(connection);
  }

  #expire(): void {
    const nowMs = performance.now();
    for (const [tag, { deadlineMs }] of this.#jobs) {
      if (deadlineMs >= nowMs) break;
      this.#mover.expire(this.#server, tag);
    }
    if (this.#jobs.size > 0) return;
    this.#others.stop();
    clearInterval(this.#sweep);
    this.#sweep = undefined;
  }
}

/** One connection: a name's addresses are tried one after the other. */
class NativeConnection {
  readonly #mover: ValueMover;
  readonly #server: number;
  readonly #onReady: () => void;
  readonly #onEnd: (reason: string, wasReady: boolean) => void;
  readonly #connectTimer: NodeJS.Timeout;
  /** Addresses that are still to be tried. */
  #hosts: string[] = [];
  #connection: number | undefined;
  #ready = false;
  #ended = false;

  constructor(
    mover: ValueMover,
    server: number,
    address: RedisAddress,
    connectTimeoutMs: number,
    on: { ready: () => void; end: (reason: string, wasReady: boolean) => void },
  ) {
    this.#mover = mover;
    this.#server = server;
    this.#onReady = on.ready;
    this.#onEnd = on.end;
    this.#connectTimer = setTimeout(() => this.destroy('no connection in time'), connectTimeoutMs);
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
    return this.#ready;
  }

  /** Its socket is closed when this returns. */
  destroy(reason: string): void {
    if (this.#ended) return;
    this.#ended = true;
    clearTimeout(this.#connectTimer);
    if (this.#connection !== undefined) this.#mover.disconnect(this.#connection);
    this.#onEnd(reason, this.#ready);
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
        this.#mover.disconnect(this.#connection!);
        this.#connect(port, why);
      }
    };
    try {
      this.#connection = this.#mover.connect(this.#server, host, port, { ready, down });
    } catch (error) {
      this.destroy((error as Error).message);
    }
  }
}
