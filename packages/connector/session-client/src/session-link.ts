/**
 * One connection to a cache node: frames out, answers in, a deadline on each request.
 *
 * Invariants: each request ends exactly once: with its last answer, at its deadline or when the link ends. At most
 * `maxOutstanding` requests wait for the node. A node that stays silent is left alone: after two deadlines without any
 * frame the link is suspended, nothing more is asked but one probe, and any frame at all lifts it. One whose pulse beats
 * meanwhile is slow: it is probed, and left alone when a deadline passes `silentAfterMs` later without a frame. A node that
 * breaks the protocol is disconnected.
 *
 * A request whose deadline passed stays known until the node answers, because a late answer may have to be undone
 * (slots that were reserved for nobody).
 */
import { connect, type Socket } from 'node:net';
import { KvError } from '@kvtier/errors';
import {
  ClientFrame,
  checkServer,
  checkSocketFolder,
  FrameReader,
  fromFailure,
  type NodePulse,
  ServerFrame,
  writeFrame,
} from '@kvtier/wire';
import { Beats } from './beats.ts';
import { SilenceWatch, silentAfterMs } from './silence.ts';
import type { Timers } from './timers.ts';

export type ClientBody = NonNullable<ClientFrame['body']>;
export type ServerBody = NonNullable<ServerFrame['body']>;
/** An answer that is no failure. */
export type Answer = Exclude<ServerBody, { $case: 'failure' }>;
type Values = { [A in Answer as A['$case']]: A['value'] };
type Case<K extends keyof Values> = Values[K];

export interface Exchange {
  /** An answer within the deadline; all but `ready` are the last one. */
  onAnswer(answer: Answer): void;
  /** No answer will come in time: refused by the node, deadline, link ended. */
  onFailure(error: KvError): void;
  /** The last answer came after the deadline. */
  onLate?(answer: Answer): void;
}

interface Pending {
  readonly exchange: Exchange;
  readonly sentAtMs: number;
  cancelTimer: () => void;
  expired: boolean;
}

const maxOutstanding = 256;
const connectTimeoutMs = 2_000;
/** Requests that in turn ran into their deadline while nothing at all came from the node. */
const silencesToSuspend = 2;
/** A pulse beats every 50 ms: where it has not, so long after a request, the node stands still. */
const beatenAfterMs = 150;
/** A suspended link whose probe is not answered by then is dropped: it may be the connection that is stuck. */
const probeDeadlineMs = 15_000;

export class SessionLink {
  /** Resolves with the reason when the connection has ended. Never rejects. */
  readonly ended: Promise<KvError>;
  readonly #socket: Socket;
  readonly #timers: Timers;
  readonly #pending = new Map<bigint, Pending>();
  readonly #onSuspend: () => void;
  readonly #onUnknown: () => void;
  #endReason: KvError | undefined;
  #nextId = 1n;
  #epoch: bigint | undefined;
  #heardAtMs: number;
  #silences = 0;
  #suspended = false;
  /** The request that asks for a sign of life, until it is answered. */
  #probe: Exchange | undefined;
  #probedAtMs = 0;
  readonly #silence: SilenceWatch;
  readonly #beats: Beats;

  /**
   * Connect to a Unix socket, and ask whose process serves it before a byte is sent: who names the arena gets all KV.
   * @throws KvError DISCONNECTED when nobody listens there or nobody answers, SETUP when another user's process or folder it is
   */
  static connect(
    path: string,
    group: number | null,
    timers: Timers,
    onSuspend: () => void,
    onUnknown: () => void = () => {},
  ): Promise<SessionLink> {
    return new Promise((resolve, reject) => {
      const socket = connect(path);
      const fail = (why: string): void => {
        cancel();
        socket.destroy();
        reject(new KvError('DISCONNECTED', `${path}: no cache node (${why}); it is tried again`, { retry: true }));
      };
      const cancel = timers.after(connectTimeoutMs, () => fail('no answer'));
      socket.once('error', (error) => fail(error.message));
      socket.once('connect', () => {
        cancel();
        socket.removeAllListeners('error');
        try {
          checkSocketFolder(path, group);
          checkServer(socket, path, group);
        } catch (error) {
          socket.destroy();
          reject(KvError.from(error));
          return;
        }
        resolve(new SessionLink(socket, timers, onSuspend, onUnknown));
      });
    });
  }

  /** `onUnknown`: a newer node said what is not known here. */
  constructor(socket: Socket, timers: Timers, onSuspend: () => void, onUnknown: () => void = () => {}) {
    this.#onUnknown = onUnknown;
    this.#socket = socket;
    this.#timers = timers;
    this.#onSuspend = onSuspend;
    this.#heardAtMs = timers.nowMs();
    this.#beats = new Beats(() => timers.nowMs());
    this.#silence = new SilenceWatch(timers, {
      isWaiting: () => this.#waiting().length > 0,
      ask: () => this.#askForLife(),
      stillMs: () => this.#beats.takeStillMs(),
      onSilent: () => {
        if (!this.#suspended) this.#suspend();
        for (const pending of this.#waiting()) this.#giveUp(pending);
      },
    });
    const reader = new FrameReader((message) => this.#receive(ServerFrame.decode(message)));
    socket.on('data', (chunk: Buffer) => {
      try {
        if (this.#endReason === undefined) reader.push(chunk);
      } catch (error) {
        this.end(KvError.from(error, 'PROTOCOL'));
      }
    });
    this.ended = new Promise((resolve) => {
      const ended = (error: unknown): void => {
        this.#endReason ??= KvError.from(error, 'DISCONNECTED');
        this.#failAll(this.#endReason);
        resolve(this.#endReason);
      };
      socket.once('error', ended);
      socket.once('close', () => ended(new KvError('DISCONNECTED', 'the cache node closed the session')));
    });
  }

  get alive(): boolean {
    return this.#endReason === undefined;
  }

  /** The node is there and answers: it may be asked. */
  get usable(): boolean {
    return this.alive && !this.#suspended;
  }

  get suspended(): boolean {
    return this.#suspended;
  }

  /** Beats where the node lives, however much it has to do; null: its frames alone tell. */
  set pulse(pulse: NodePulse | null) {
    this.#beats.pulse = pulse;
  }

  /** Boot epoch of the node, once it has answered. */
  get epoch(): bigint | undefined {
    return this.#epoch;
  }

  /** Close; whatever is pending fails with `reason`. */
  end(reason: KvError): void {
    if (this.#endReason !== undefined) return;
    this.#endReason = reason;
    this.#failAll(reason);
    this.#socket.destroy();
  }

  /**
   * Send a request; returns its id, or a KvError when it was not sent (`exchange` then hears nothing).
   * `owed` requests give something back (Commit, Abort, Release): they pass the bounds, each follows one that did not.
   */
  send(body: ClientBody, deadlineMs: number, exchange: Exchange, owed = false): bigint | KvError {
    if (this.#endReason !== undefined) return this.#endReason;
    if (!owed && this.#suspended) return new KvError('DEADLINE', 'the cache node does not answer', { retry: true });
    if (!owed && this.#pending.size >= maxOutstanding) {
      return new KvError('BUSY', 'too many requests wait for the cache node', { retry: true });
    }
    const id = this.#nextId++;
    this.#beats.feel(); // what it beat until now says nothing of what comes
    const pending: Pending = { exchange, sentAtMs: this.#timers.nowMs(), cancelTimer: () => {}, expired: false };
    if (!writeFrame(this.#socket, ClientFrame.encode({ id, body }).finish())) {
      return new KvError('DISCONNECTED', 'the cache node does not read', { retry: true });
    }
    this.#pending.set(id, pending);
    if (this.#epoch !== undefined) this.#silence.begin(); // before its first answer a node may take its time
    pending.cancelTimer = this.#timers.after(deadlineMs, () => {
      // If we were late ourselves, the answer may lie in the socket already: let it in first.
      setImmediate(() => {
        if (this.#pending.get(id) === pending) this.#expire(pending);
      });
    });
    return id;
  }

  /** A request with one answer of the kind `wanted`. Rejects with KvError. */
  call<K extends Answer['$case']>(
    body: ClientBody,
    wanted: K,
    deadlineMs: number,
    options: { onLate?: (value: Case<K>) => void; onSent?: (id: bigint) => void; owed?: boolean } = {},
  ): Promise<Case<K>> {
    return new Promise((resolve, reject) => {
      const take = (answer: Answer, use: (value: Case<K>) => void): void => {
        if (answer.$case === wanted) {
          use(answer.value as Case<K>);
          return;
        }
        const error = new KvError('PROTOCOL', `the cache node answered ${body.$case} with ${answer.$case}`);
        this.end(error);
        reject(error);
      };
      const exchange: Exchange = {
        onAnswer: (answer) => take(answer, resolve),
        onFailure: reject,
        onLate: (answer) => take(answer, options.onLate ?? (() => {})),
      };
      const sent = this.send(body, deadlineMs, exchange, options.owed);
      if (sent instanceof KvError) reject(sent);
      else options.onSent?.(sent);
    });
  }

  /** Stop waiting for a request: nothing of it matters any more, and the node knows. */
  forget(id: bigint): void {
    this.#pending.get(id)?.cancelTimer();
    this.#pending.delete(id);
  }

  #receive(frame: ServerFrame): void {
    if (!this.alive) return;
    this.#epoch ??= frame.bootEpoch;
    if (frame.bootEpoch !== this.#epoch) throw new KvError('PROTOCOL', 'the cache node changed its boot epoch');
    this.#heardAtMs = this.#timers.nowMs();
    this.#silences = 0;
    this.#suspended = false;
    this.#silence.heard();
    const { body } = frame;
    if (body === undefined) {
      // A newer node's. Whatever it says, more of it may follow: the deadline ends the request.
      this.#onUnknown();
      return;
    }
    const pending = this.#pending.get(frame.id);
    if (pending === undefined) return; // an answer to something forgotten
    if (body.$case !== 'ready') this.forget(frame.id);
    if (body.$case === 'failure') {
      if (!pending.expired) pending.exchange.onFailure(fromFailure(body.value));
    } else if (!pending.expired) pending.exchange.onAnswer(body);
    else if (body.$case !== 'ready') pending.exchange.onLate?.(body);
  }

  #expire(pending: Pending): void {
    if (pending.expired) return;
    if (this.#heardAtMs < pending.sentAtMs) this.#silences++;
    if (this.#silences >= silencesToSuspend) this.#doubt(pending.sentAtMs);
    this.#giveUp(pending);
  }

  /** What was sent then has ended without an answer, and not for the first time. */
  #doubt(sentAtMs: number): void {
    if (!this.alive || this.#suspended || this.#heardAtMs >= sentAtMs) return;
    const nowMs = this.#timers.nowMs();
    if (this.#beats.since(sentAtMs)) {
      // One that beats and says nothing when it is asked costs no more deadlines, either.
      const isProbed =
        this.#probe !== undefined && nowMs - Math.max(this.#probedAtMs, this.#heardAtMs) >= silentAfterMs;
      if (isProbed) this.#suspend();
      else this.#askForLife();
      return;
    }
    const leftMs = this.#beats.pulse === null ? 0 : sentAtMs + beatenAfterMs - nowMs;
    if (leftMs > 0) this.#timers.after(leftMs, () => setImmediate(() => this.#doubt(sentAtMs)));
    else this.#suspend();
  }

  #giveUp(pending: Pending): void {
    if (pending.expired) return;
    pending.expired = true;
    pending.cancelTimer();
    pending.exchange.onFailure(new KvError('DEADLINE', 'the cache node did not answer in time', { retry: true }));
  }

  /** Those that somebody waits for. */
  #waiting(): Pending[] {
    return [...this.#pending.values()].filter(({ exchange, expired }) => !expired && exchange !== this.#probe);
  }

  #suspend(): void {
    if (!this.#askForLife()) return;
    this.#suspended = true;
    this.#onSuspend();
  }

  /** Once at a time. False: it cannot be sent, and the link is about to end. */
  #askForLife(): boolean {
    if (this.#probe !== undefined) return true;
    const probe: Exchange = {
      onAnswer: () => {
        this.#probe = undefined;
      },
      onFailure: (error) => {
        this.#probe = undefined;
        if (this.#suspended) this.end(error); // a refusal is a sign of life
      },
    };
    this.#probe = probe;
    this.#probedAtMs = this.#timers.nowMs();
    const sent = this.send({ $case: 'stats', value: {} }, probeDeadlineMs, probe, true);
    if (sent instanceof KvError) this.#probe = undefined;
    return this.#probe !== undefined;
  }

  #failAll(reason: KvError): void {
    this.#silence.end();
    const all = [...this.#pending.values()];
    this.#pending.clear();
    for (const pending of all) {
      pending.cancelTimer();
      if (!pending.expired) pending.exchange.onFailure(reason);
    }
  }
}
