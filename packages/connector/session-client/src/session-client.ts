/**
 * The session with the cache node, kept up for ever: connect, attach, map the arena; when it ends, wait for the copies
 * in flight, unmap, and start again after a jittered pause.
 *
 *      ┌──────────► connecting ──► attaching ──► attached ──┐
 *      │                │              │                    │ connection ended
 *      └──── pause ◄────┴──────────────┴──── draining ◄─────┘ (copies end by themselves, then the arena is unmapped)
 *
 * Invariant: an arena is unmapped, and its session named as `previous_session`, only after all copies that were started
 * in it have ended: the node may give those slots away from then on.
 */
import { randomInt } from 'node:crypto';
import path from 'node:path';
import { KvError } from '@kvtier/errors';
import type { Executor } from '@kvtier/executor';
import { HeldBlocks, holdArena, sessionProtocol } from '@kvtier/wire';
import type { ConnectorCounters } from './counters.ts';
import { SessionLink } from './session-link.ts';
import type { Timers } from './timers.ts';

/** The few methods of a logger that are used here. */
export interface ConnectorLogger {
  info(fields: object, message: string): void;
  warn(fields: object, message: string): void;
}

export interface SessionOptions {
  readonly socketPath: string;
  /** The node may be of another user, if its socket's folder is of this group. */
  readonly group?: number | null | undefined;
  /** Where this process sees the folder of the node's arena. */
  readonly arenaDir?: string | undefined;
  readonly executor: Pick<Executor, 'attachArena' | 'detachArena'>;
  /** 32-byte digest. */
  readonly namespace: Uint8Array;
  readonly payloadBytes: number;
  readonly blockTokens: number;
  readonly hashBytes: number;
  /** Who pays for this engine's blocks; default "". */
  readonly tenant?: string;
  /** Its blocks are removed so long after they were committed; default 0: never. */
  readonly ttlSeconds?: number;
  readonly timers: Timers;
  readonly logger: ConnectorLogger;
  readonly counters: ConnectorCounters;
}

/** Of the arena's lock file, by which the node sees that this process has ended: one for all sessions. */
const lockByte = randomInt(1, 2 ** 48 - 1);
const attachDeadlineMs = 5_000;
const firstPauseMs = 20;
const longestPauseMs = 1_000;
/** A session that lived this long was a good one: the next pause is short again. */
const goodSessionMs = 1_000;
/** Engine and node start at the same time, and nothing is wrong when the node is the slower one by so much. */
const startMs = 30_000;

/** One attachment: a live link and a mapped arena. */
export class Session {
  readonly link: SessionLink;
  readonly id: Buffer;
  /** The executor's number for the mapped arena. */
  readonly arena: number;
  /** Payload offsets beyond this do not exist. */
  readonly lastOffset: number;
  /** The node's KV events carry token ids: a Reserve is to say them. */
  readonly wantsTokenIds: boolean;
  /** Ends this process's lock on the node's lock file: no copy of this session runs any more. */
  readonly letGo: () => void;
  /** What the node says is held, without being asked; null: it does not. */
  readonly held: HeldBlocks | null;
  #copies = 0;
  #whenIdle: (() => void)[] = [];

  constructor(
    link: SessionLink,
    id: Buffer,
    arena: number,
    lastOffset: number,
    wantsTokenIds = false,
    letGo: () => void = () => {},
    held: HeldBlocks | null = null,
  ) {
    this.link = link;
    this.id = id;
    this.arena = arena;
    this.lastOffset = lastOffset;
    this.wantsTokenIds = wantsTokenIds;
    this.letGo = letGo;
    this.held = held;
  }

  /** Run a copy in the arena; the arena stays mapped until it has ended. Not started once the session has ended. */
  async copy<T>(run: () => Promise<T>): Promise<T> {
    if (!this.link.alive) throw new KvError('DISCONNECTED', 'the session ended before the copy', { retry: true });
    this.#copies++;
    try {
      return await run();
    } finally {
      this.#copies--;
      if (this.#copies === 0) for (const resolve of this.#whenIdle.splice(0)) resolve();
    }
  }

  /** Resolves when no copy is in flight. */
  idle(): Promise<void> {
    return this.#copies === 0 ? Promise.resolve() : new Promise((resolve) => this.#whenIdle.push(resolve));
  }

  /** Wire offsets as the executor takes them; a place outside the arena is the node's error. */
  offsets(wire: readonly bigint[]): Float64Array {
    const offsets = new Float64Array(wire.length);
    for (let i = 0; i < offsets.length; i++) {
      const number = Number(wire[i]!);
      if (number <= 0 || number > this.lastOffset) {
        throw new KvError('PROTOCOL', `the cache node named offset ${wire[i]} outside of its arena`);
      }
      offsets[i] = number;
    }
    return offsets;
  }
}

export class SessionClient {
  readonly #options: SessionOptions;
  readonly #finished: Promise<void>;
  #session: Session | null = null;
  #link: SessionLink | null = null;
  #closed = false;
  #endPause: () => void = () => {};
  #lastComplaint = '';
  readonly #startedAtMs: number;

  constructor(options: SessionOptions) {
    this.#options = options;
    this.#startedAtMs = options.timers.nowMs();
    this.#finished = this.#run();
  }

  /** The session, when there is one and the node answers. */
  get session(): Session | null {
    return this.#session?.link.usable ? this.#session : null;
  }

  /** Attached, but left alone until it answers again. */
  get suspended(): boolean {
    return this.#session?.link.suspended ?? false;
  }

  /** End the session; resolves when the arena is let go of. */
  close(): Promise<void> {
    this.#closed = true;
    this.#endPause();
    this.#link?.end(new KvError('DISCONNECTED', 'the engine closes its session'));
    return this.#finished;
  }

  async #run(): Promise<void> {
    let pauseMs = firstPauseMs;
    let previous: Buffer = Buffer.alloc(0);
    while (!this.#closed) {
      const startedAtMs = this.#options.timers.nowMs();
      try {
        const session = await this.#attach(previous);
        this.#session = session;
        this.#options.counters.sessions++;
        this.#lastComplaint = '';
        this.#options.logger.info({ session: session.id.toString('hex') }, 'attached to the cache node');
        const reason = await session.link.ended;
        this.#session = null;
        if (!this.#closed) this.#options.logger.warn({ reason: reason.message }, 'the session ended');
        await session.idle();
        await this.#options.executor.detachArena(session.arena);
        session.letGo();
        session.held?.close();
        previous = session.id;
      } catch (error) {
        this.#complain(KvError.from(error));
      }
      if (this.#options.timers.nowMs() - startedAtMs >= goodSessionMs) pauseMs = firstPauseMs;
      await this.#pause(pauseMs * (0.5 + Math.random()));
      pauseMs = Math.min(longestPauseMs, pauseMs * 2);
    }
  }

  async #attach(previousSession: Buffer): Promise<Session> {
    const { socketPath, executor, timers, counters, payloadBytes } = this.#options;
    const { group = null, arenaDir } = this.#options;
    const onSuspend = (): void => {
      counters.suspensions++;
      this.#options.logger.warn({}, 'the cache node does not answer; it is left alone until it does');
    };
    const link = await SessionLink.connect(socketPath, group, timers, onSuspend, () => counters.unknownAnswers++);
    this.#link = link;
    try {
      if (this.#closed) throw new KvError('CANCELLED', 'the engine is closing');
      const attached = await link.call(
        {
          $case: 'attach',
          value: {
            protocol: sessionProtocol,
            namespace: Buffer.from(this.#options.namespace),
            payloadBytes: BigInt(payloadBytes),
            blockTokens: this.#options.blockTokens,
            hashBytes: this.#options.hashBytes,
            client: `engine-worker pid ${process.pid}`,
            previousSession,
            tenant: this.#options.tenant ?? '',
            ttlSeconds: this.#options.ttlSeconds ?? 0,
          },
        },
        'attached',
        attachDeadlineMs,
      );
      const arenaBytes = Number(attached.arenaBytes);
      const arenaPath =
        arenaDir === undefined ? attached.arenaPath : path.join(arenaDir, path.basename(attached.arenaPath));
      const arena = executor.attachArena(arenaPath, arenaBytes, attached.arenaId);
      const letGo = attached.hasLockFile ? holdArena(arenaPath, lockByte) : null;
      if (letGo !== null) {
        const hold = { $case: 'hold', value: { byte: BigInt(lockByte) } } as const;
        // Nobody waits for the answer: without it the node looks at the process instead.
        link.call(hold, 'done', attachDeadlineMs).catch(() => {});
      }
      const { session, wantsTokenIds, heldTag } = attached;
      const held = heldTag === undefined ? null : HeldBlocks.open(arenaPath, heldTag);
      link.pulse = held;
      return new Session(
        link,
        Buffer.from(session),
        arena,
        arenaBytes - payloadBytes,
        wantsTokenIds,
        letGo ?? undefined,
        held,
      );
    } catch (error) {
      link.end(KvError.from(error));
      throw error;
    }
  }

  /** The same trouble is reported once, not at every attempt; that nobody listens or answers yet is none while the node may still start. */
  #complain(error: KvError): void {
    const complaint = `${error.code}: ${error.message}`;
    if (this.#closed || complaint === this.#lastComplaint) return;
    const { timers, counters } = this.#options;
    const isStarting = counters.sessions === 0 && timers.nowMs() - this.#startedAtMs < startMs;
    if (isStarting && (error.code === 'DISCONNECTED' || error.code === 'DEADLINE')) return;
    this.#lastComplaint = complaint;
    this.#options.logger.warn({ code: error.code, reason: error.message }, 'no session with the cache node yet');
  }

  #pause(ms: number): Promise<void> {
    if (this.#closed) return Promise.resolve();
    return new Promise((resolve) => {
      const cancel = this.#options.timers.after(ms, resolve);
      this.#endPause = () => {
        cancel();
        resolve();
      };
    });
  }
}
