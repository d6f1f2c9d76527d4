/**
 * One connection = one session. It reads frames, attaches, answers, and gives everything back when it ends.
 *
 * Invariants: the first frame is an Attach, within its deadline; a frame that cannot be understood ends this session
 * and no other; a peer that does not read is first not listened to (`pauseBytes`), then disconnected
 * (`maxPendingBytes`); one that asks much at once is answered `framesPerTurn` requests a turn, in their order, fewer where
 * the turn's time is over (session-turns.ts), and not read meanwhile. A request about many blocks goes on over several turns,
 * and what the session asked after it waits. Slots that may still be in use by the peer's copies go to quarantine, never
 * straight back.
 */
import { randomBytes } from 'node:crypto';
import type { Socket } from 'node:net';
import { KvError } from '@kvtier/errors';
import { namespaceFromDigest } from '@kvtier/identity';
import { type Holdings, type Steps, tagOf } from '@kvtier/placement';
import { type Attach, ClientFrame, FrameReader, ServerFrame, sessionProtocol, writeFrame } from '@kvtier/wire';
import { checkShape } from './frame-shape.ts';
import type { SessionLimits } from './limits.ts';
import type { SessionServerOptions } from './options.ts';
import type { PeerProcess } from './peer-process.ts';
import type { Quarantine } from './quarantine.ts';
import { answer, type RequestContext, type ServerBody } from './requests.ts';
import type { SessionTurns } from './session-turns.ts';

export interface ConnectionOptions extends SessionServerOptions {
  readonly limits: SessionLimits;
  readonly peer: PeerProcess;
  readonly quarantine: Quarantine;
  /** Of all sessions. */
  readonly turns: SessionTurns;
  /** The peer says that the copies of this session of its own have ended. */
  readonly endPrevious: (session: string, peer: PeerProcess) => void;
  readonly gauges: () => Readonly<Record<string, number>>;
  readonly onClosed: (connection: Connection) => void;
}

export class Connection {
  readonly #socket: Socket;
  readonly #options: ConnectionOptions;
  readonly #id = randomBytes(16);
  readonly session = this.#id.toString('hex');
  #context: RequestContext | undefined;
  #client = '';
  /** The byte of the arena's lock file that the engine's processes hold. */
  #heldByte: number | undefined;
  readonly #reader = new FrameReader((message) => this.#onFrame(message));
  /** Begun, and not answered yet: the first of them goes on. */
  #begun: { readonly id: bigint; readonly steps: Steps<ServerBody> }[] = [];
  /** Of what was read, the frames that wait for another turn. */
  #unanswered: Buffer = Buffer.alloc(0);
  #cancelDeadline: () => void;

  constructor(socket: Socket, options: ConnectionOptions) {
    this.#socket = socket;
    this.#options = options;
    const { clock, limits } = options;
    socket.on('data', (chunk) => this.#read(chunk));
    socket.on('drain', () => this.#read(this.#unanswered));
    socket.on('error', (error) => this.#warn('connection ended', error));
    socket.on('close', () => this.#onClose());
    this.#cancelDeadline = clock.after(limits.attachDeadlineMs, () => this.#endUnattached());
  }

  get peer(): PeerProcess {
    return this.#options.peer;
  }

  /**
   * Once this turn has read its sockets and answered what they had: timers come first in it, and where the process did not run for a while,
   * an Attach that was sent in time is not read yet.
   */
  #endUnattached(): void {
    const { attachDeadlineMs } = this.#options.limits;
    const decide = setImmediate(() => {
      if (this.#unanswered.length > 0) this.#endUnattached();
      else
        this.#fail(0n, new KvError('PROTOCOL', `session link: no Attach within ${attachDeadlineMs} ms; send it first`));
    });
    this.#cancelDeadline = () => clearImmediate(decide);
  }

  /** Ends the session now; slots in use go to quarantine. */
  destroy(): void {
    this.#socket.destroy();
  }

  /** Ends the session now; its peer says that no copy is under way any more. */
  endSafely(): void {
    this.#leave();
    this.#context?.holdings.end();
    this.#socket.destroy();
  }

  /** Answers the frames of `bytes`, as many as a turn may take and the peer's unread answers allow; the rest waits, and the socket with it. */
  #read(bytes: Buffer): void {
    const socket = this.#socket;
    const { limits, turns } = this.#options;
    if (socket.writableEnded) {
      this.#unanswered = Buffer.alloc(0);
      socket.resume(); // it has been refused; whatever it goes on sending, only its end is of interest
      return;
    }
    const { framesPerTurn, pauseBytes } = limits;
    const mayGoOn = (): boolean => !socket.destroyed && !socket.writableEnded && this.#begun.length === 0;
    let frames = 0;
    this.#finish();
    try {
      this.#unanswered = this.#reader.push(
        bytes,
        () => mayGoOn() && frames++ < framesPerTurn && socket.writableLength <= pauseBytes && turns.hasTime,
      );
    } catch (error) {
      this.#unanswered = Buffer.alloc(0);
      this.#fail(0n, error);
    }
    if (socket.destroyed) return;
    const isBehind = socket.writableLength > pauseBytes; // 'drain' tells when it has caught up
    if (!isBehind && this.#unanswered.length === 0 && this.#begun.length === 0) {
      socket.resume();
      return;
    }
    socket.pause();
    if (!isBehind) turns.later(this.#goOn);
  }

  readonly #goOn = (): void => this.#read(this.#unanswered);

  #onFrame(message: Buffer): void {
    let frame: ClientFrame;
    try {
      checkShape(message, this.#options.limits.maxHashes);
      frame = ClientFrame.decode(message);
    } catch (error) {
      const why = `session link: a frame is no message (${(error as Error).message})`;
      this.#fail(0n, error instanceof KvError ? error : new KvError('PROTOCOL', why));
      return;
    }
    try {
      if (frame.body === undefined) throw unknownRequest(this.#context !== undefined);
      if (this.#context !== undefined) {
        const answered = answer(this.#context, frame.id, frame.body);
        if (answered === undefined) return;
        if ('$case' in answered) this.#send(frame.id, answered);
        else {
          this.#begun.push({ id: frame.id, steps: answered });
          if (this.#options.turns.hasTime) this.#finish(); // to read so many numbers may have taken all of it
        }
      } else if (frame.body.$case === 'attach') this.#attach(frame.id, frame.body.value);
      else throw new KvError('PROTOCOL', `${frame.body.$case}: before Attach; send Attach first`);
    } catch (error) {
      this.#fail(frame.id, error);
    }
  }

  /** Goes on with what was begun, a step at least, as far as the turn has time. */
  #finish(): void {
    const { turns } = this.#options;
    for (let first = this.#begun[0]; first !== undefined; first = this.#begun[0]) {
      try {
        const step = first.steps.next();
        if (step.done) {
          this.#begun.shift();
          this.#send(first.id, step.value);
        }
      } catch (error) {
        this.#begun.shift();
        this.#fail(first.id, error);
      }
      if (!turns.hasTime) return;
    }
  }

  /** What was begun is not finished. */
  #leave(): void {
    for (const { steps } of this.#begun.splice(0)) steps.return(undefined as never);
  }

  #attach(id: bigint, attach: Attach): void {
    const {
      arenaBytes,
      maxPayloadBytes,
      headerBytes,
      arenaPath,
      arenaId,
      isArenaThere = () => true,
      store,
      endPrevious,
      peer,
      limits,
      gauges,
      mayCome = () => true,
      tokens = null,
      isByteHeld = null,
      tellsHeld = false,
      log,
    } = this.#options;
    checkAttach(attach, maxPayloadBytes);
    checkArena(arenaPath, isArenaThere);
    if (attach.previousSession.length > 0) endPrevious(attach.previousSession.toString('hex'), peer);
    const namespace = namespaceFromDigest(attach.namespace);
    const traits = { tenant: attach.tenant, ttlS: attach.ttlSeconds, hashBytes: attach.hashBytes };
    const holdings: Holdings = store.open(namespace, Number(attach.payloadBytes), attach.blockTokens, traits);
    this.#options.onAttach?.(namespace, attach.blockTokens);
    this.#cancelDeadline();
    this.#client = attach.client.slice(0, 200);
    const send = (to: bigint, body: ServerBody): void => this.#send(to, body);
    const { hashBytes, blockTokens } = attach;
    const hold = (byte: number): boolean => {
      const held = isByteHeld?.(byte) ?? false;
      if (held) this.#heldByte = byte;
      return held;
    };
    const goOn = (id: bigint, steps: Steps<ServerBody>): void => {
      this.#begun.push({ id, steps });
      this.#options.turns.later(this.#goOn);
    };
    const about = { store, holdings, hashBytes, blockTokens, headerBytes, limits, gauges, tokens };
    this.#context = { ...about, mayCome, hold, send, goOn };
    store.counters.add('session.attached');
    log.info({ session: this.session, client: this.#client, pid: peer.pid }, 'session attached');
    const arena = { arenaPath, arenaBytes: BigInt(arenaBytes), arenaId };
    const offers = { ...(tokens !== null && { wantsTokenIds: true }), ...(isByteHeld && { hasLockFile: true }) };
    const told = tellsHeld ? { heldTag: tagOf(namespace.key)[0]! >>> 0 } : {};
    const value = { session: this.#id, ...arena, headerBytes, ...offers, ...told, endsPins: true };
    this.#send(id, { $case: 'attached', value });
  }

  #send(id: bigint, body: ServerBody): void {
    const { bootEpoch, limits } = this.#options;
    writeFrame(this.#socket, ServerFrame.encode({ id, bootEpoch, body }).finish(), limits.maxPendingBytes);
  }

  /** Tell the peer; what broke the protocol ends the session. A defect of ours is not the peer's: it ends the process. */
  #fail(id: bigint, error: unknown): void {
    if (!(error instanceof KvError)) throw error;
    const { code, message, retry, tier } = error;
    this.#options.store.counters.add(`session.failed.${code}`);
    this.#send(id, { $case: 'failure', value: { code, message, retry, tier: tier ?? '' } });
    if (code !== 'PROTOCOL' && this.#context !== undefined) return;
    this.#warn('session refused', error);
    this.#leave();
    this.#socket.end();
    this.#cancelDeadline();
    this.#cancelDeadline = this.#options.clock.after(this.#options.limits.goodbyeMs, () => this.#socket.destroy());
  }

  #warn(what: string, error: Error): void {
    const { log, peer } = this.#options;
    log.warn({ session: this.session, client: this.#client, pid: peer.pid, reason: error.message }, what);
  }

  #onClose(): void {
    this.#cancelDeadline();
    const { quarantine, peer, onClosed, isByteHeld, turns } = this.#options;
    turns.forget(this.#goOn);
    this.#leave();
    const byte = this.#heldByte;
    const holdings = this.#context?.holdings;
    holdings?.disconnect();
    if (holdings?.holdsSlots)
      quarantine.add(this.session, holdings, peer, byte && isByteHeld ? () => isByteHeld(byte) : null);
    else holdings?.end();
    onClosed(this);
  }
}

/** A newer engine may ask what this node does not know: it is refused that, and its session stays. Nobody begins so. */
function unknownRequest(isAttached: boolean): KvError {
  const what = 'session link: an unknown or empty request';
  return isAttached
    ? new KvError('REQUEST', `${what}; run a node that is as new as its engines for it`)
    : new KvError('PROTOCOL', `${what} before Attach; send Attach first`);
}

const maxTenantName = 200;
const maxTtlSeconds = 10 * 365 * 86_400;

/** KvError SETUP: the file that an engine would map is not there. */
function checkArena(arenaPath: string, isArenaThere: () => boolean): void {
  let why = 'was removed';
  try {
    if (isArenaThere()) return;
  } catch (error) {
    why = `cannot be looked at (${(error as Error).message})`;
  }
  const what = `attach: the arena's file ${arenaPath} ${why}`;
  throw new KvError('SETUP', `${what}; start the cache node again, and see what cleans up its folder`, { retry: true });
}

/** KvError PROTOCOL for what this node cannot speak, CAPACITY for blocks that the arena cannot hold. */
function checkAttach(attach: Attach, maxPayloadBytes: number): void {
  const refuse = (what: string): never => {
    throw new KvError('PROTOCOL', `attach: ${what}`);
  };
  if (attach.protocol !== sessionProtocol) {
    refuse(
      `protocol ${attach.protocol}, this node speaks ${sessionProtocol}; run engine and node of the same kvtier version`,
    );
  }
  if (attach.namespace.length !== 32) refuse(`the namespace has ${attach.namespace.length} bytes, not 32`);
  if (attach.hashBytes !== 16 && attach.hashBytes !== 32) refuse(`hashes of ${attach.hashBytes} bytes, not 16 or 32`);
  if (attach.blockTokens < 1 || attach.blockTokens > 65_536)
    refuse(`blocks of ${attach.blockTokens} tokens, not 1 to 65536`);
  if (attach.payloadBytes < 1n || attach.payloadBytes > BigInt(Number.MAX_SAFE_INTEGER))
    refuse('payload_bytes is out of range');
  if (attach.tenant.length > maxTenantName) refuse(`the tenant's name is longer than ${maxTenantName} characters`);
  if (attach.ttlSeconds > maxTtlSeconds) refuse(`ttl_seconds is above ${maxTtlSeconds}, ten years; send 0 for "never"`);
  const previous = attach.previousSession.length;
  if (previous !== 0 && previous !== 16) refuse(`previous_session has ${previous} bytes, not 16`);
  if (attach.payloadBytes > BigInt(maxPayloadBytes)) {
    const what = `attach: blocks of ${attach.payloadBytes} bytes, the arena takes ${maxPayloadBytes} at most`;
    throw new KvError('CAPACITY', `${what}; give the cache node a larger arena.bytes`);
  }
}
