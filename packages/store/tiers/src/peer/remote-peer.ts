/**
 * One peer, seen from the node that fetches: its control connection, which comes back by itself, and its streams, over which
 * blocks come. Invariants: at most `windowBytes` in flight on one stream; a job ends exactly once, within its deadline; when
 * the control connection ends, so do the streams.
 */
import { isIP } from 'node:net';
import { KvError } from '@kvtier/errors';
import type { Log } from '@kvtier/runtime';
import { Watch } from '@kvtier/runtime';
import type { Slices } from '../kit/slices.ts';
import { type Control, dial, maxBufferedBytes, type PeerSecurity } from './control.ts';
import type { ChangeMessage, Message } from './frames.ts';
import type { ConnectionEnd, FetchBlocks, FetchResult, PeerLoops } from './peer-loops.ts';
import { silentHeartbeats } from './peer-server.ts';

export interface PeerAddress {
  readonly host: string;
  readonly port: number;
}

export interface RemotePeerOptions<Blocks extends FetchBlocks> {
  readonly address: PeerAddress;
  readonly loops: PeerLoops;
  readonly security: PeerSecurity;
  readonly epoch: bigint;
  readonly log: Log;
  readonly streams: number;
  readonly windowBytes: number;
  readonly maxRetryMs: number;
  readonly joinMs: number;
  /** Called once for each block of a `fetch`. */
  readonly onFetched: (blocks: Blocks, index: number, result: FetchResult) => void;
  /** Returns what has to be waited for before the next one. */
  readonly onChange: (change: ChangeMessage) => Promise<void> | undefined;
  /** Everything that it held is gone from sight; fulfilled when it is gone from memory, so that it may tell anew. */
  readonly onGone: () => Promise<void>;
  /** It said something that only newer nodes know. */
  readonly onUnknown: () => void;
  /** Of all peers of the node. */
  readonly slices: Slices;
}

/** What waits for a stream: those of `indexes` from `at` on. */
interface Order<Blocks> {
  readonly blocks: Blocks;
  readonly indexes: readonly number[];
  at: number;
}

interface Stream {
  connection: number;
  up: boolean;
  inFlightBytes: number;
  /** What it is given in this turn. */
  taken: number[];
  failures: number;
  retry: NodeJS.Timeout | undefined;
}

interface Session {
  readonly control: Control;
  readonly host: string;
  readonly dataPort: number;
  readonly session: Buffer;
  readonly dataKey: Buffer;
  /** Boot epoch of the node. */
  readonly epoch: bigint;
}

const minRetryMs = 100;
const sweepMs = 50;
/** What the native side takes unanswered on one connection is 1024. */
const maxBlocksInFlight = 512;

export class RemotePeer<Blocks extends FetchBlocks> {
  readonly #options: RemotePeerOptions<Blocks>;
  #session: Session | undefined;
  #dialing: Control | undefined;
  #streams: Stream[] = [];
  #queue: Order<Blocks>[] = [];
  #queuedBytes = 0;
  #blocksInFlight = 0;
  #failures = 0;
  /** While it waits for its next try. */
  #retry: NodeJS.Timeout | undefined;
  #dialedMs = 0;
  #sweeper: NodeJS.Timeout | undefined;
  #closed = false;
  #pumping = false;
  /** It let a fetch run into its limit and has said nothing since. */
  #suspect = false;
  #listed = false;
  #reason = 'not connected yet';
  readonly #sinceMs = performance.now();
  #awaySinceMs = this.#sinceMs;
  #wasConnected = false;
  #isWarned = false;

  constructor(options: RemotePeerOptions<Blocks>) {
    this.#options = options;
    this.#dial();
  }

  get name(): string {
    return `${this.#options.address.host}:${this.#options.address.port}`;
  }

  /** Its index is ours and blocks can come. */
  get usable(): boolean {
    return this.#session !== undefined && !this.#suspect && this.#streams.some(({ up }) => up);
  }

  /** It has told all that it held when it connected. */
  get listed(): boolean {
    return this.connected && this.#listed;
  }

  get connected(): boolean {
    return this.#session !== undefined;
  }

  /** It is the node with this boot epoch, or may be: it is connected again soon, if it ever is. */
  mayBe(epoch: bigint): boolean {
    if (this.#session !== undefined) return this.#session.epoch === epoch;
    return performance.now() - this.#awaySinceMs < 2 * this.#options.maxRetryMs;
  }

  /** Somebody asks whether it is there: what waits for its next try begins it now, but not again and again. */
  dialSoon(): void {
    const nowMs = performance.now();
    if (this.#closed || this.#retry === undefined || nowMs - this.#dialedMs < this.#options.maxRetryMs / 10) return;
    clearTimeout(this.#retry);
    this.#dial();
  }

  /** Why it is not connected; "" when it is. */
  get reason(): string {
    return this.connected ? '' : this.#reason;
  }

  /** Bytes asked for and not yet here. */
  get loadBytes(): number {
    return this.#queuedBytes + this.#streams.reduce((sum, { inFlightBytes }) => sum + inFlightBytes, 0);
  }

  /** Bring the blocks of these indexes. Keeps `indexes`. */
  fetch(blocks: Blocks, indexes: readonly number[]): void {
    const order = { blocks, indexes, at: 0 };
    if (!this.usable) {
      this.#fail([order]);
      return;
    }
    this.#queue.push(order);
    for (const index of indexes) this.#queuedBytes += blocks.slotBytes[index]!;
    this.#pump();
  }

  /** What is used is left untold while much is unsent. All else is rare, and nothing makes up for it. */
  hint(message: Message): void {
    const control = this.#session?.control;
    const isUse = message.kind === 'hint' && message.what === 'used';
    if (control !== undefined && (!isUse || control.unsentBytes < maxBufferedBytes / 2)) control.send(message);
  }

  /** Ends its connections; what is in flight fails. */
  close(): void {
    this.#closed = true;
    clearTimeout(this.#retry);
    const error = new KvError('DISCONNECTED', 'peer: this node is closing');
    this.#dialing?.end(error);
    this.#session?.control.end(error);
    this.#failQueue();
  }

  #dial(): void {
    this.#retry = undefined;
    this.#dialedMs = performance.now();
    const { address, security, epoch, slices } = this.#options;
    const remember = (control: Control): void => {
      this.#dialing = control;
    };
    dial(address.host, address.port, security, epoch, slices, remember).then(
      (proven) => this.#connected(proven),
      (error: unknown) => {
        this.#note(KvError.from(error, 'PROTOCOL'));
        this.#later();
      },
    );
  }

  #connected(proven: Awaited<ReturnType<typeof dial>>): void {
    const { control, session, dataPort, dataKey, heartbeatMs, peerEpoch } = proven;
    this.#dialing = undefined;
    const host = control.socket.remoteAddress ?? '';
    if (this.#closed || isIP(host) === 0) {
      const why = this.#closed ? 'this node is closing' : "it ended the connection; see the peer's log";
      control.end(new KvError('DISCONNECTED', `peer: ${why}`));
      // What ended it first, between its last word of the handshake and this.
      control.onEnd((error) => {
        this.#note(error);
        this.#later();
      });
      return;
    }
    this.#session = { control, host, dataPort, session, dataKey, epoch: peerEpoch };
    this.#suspect = false;
    this.#listed = false;
    this.#failures = 0;
    this.#wasConnected = true;
    this.#reason = '';
    let sequence = 0;
    const watchMs = Math.min(60_000, Math.max(10, heartbeatMs));
    const watch = new Watch(watchMs, (nowMs) => {
      if (control.isHeld) {
        // Its pings wait behind what we do not take.
        heardMs = nowMs;
        control.send({ kind: 'pong' });
      } else if (nowMs - heardMs > silentHeartbeats * watchMs)
        control.end(new KvError('DEADLINE', `peer ${this.name}: nothing heard of it; see whether that node hangs`));
    });
    let heardMs = watch.nowMs();
    control.onEnd((error) => {
      watch.stop();
      this.#ended(error);
    });
    control.listen((message) => {
      heardMs = watch.nowMs();
      this.#suspect = false;
      if (message.kind === 'ping') control.send({ kind: 'pong' });
      else if (message.kind === 'change' && message.sequence === ++sequence) {
        const busy = this.#options.onChange(message);
        if (busy !== undefined) control.hold(busy);
      } else if (message.kind === 'listed') this.#listed = true;
      else if (message.kind === 'unknown') this.#options.onUnknown();
      else {
        control.end(new KvError('PROTOCOL', `peer ${this.name}: it speaks out of turn; run nodes of one version`));
      }
    });
    if (control.ended) return;
    this.#streams = Array.from({ length: this.#options.streams }, () => ({
      ...{ connection: 0, up: false, inFlightBytes: 0, taken: [], failures: 0, retry: undefined },
    }));
    for (const stream of this.#streams) this.#open(stream);
    this.#options.log.info({ peer: this.name, epoch: peerEpoch.toString(16) }, 'connected to a peer');
  }

  #ended(error: KvError): void {
    const streams = this.#streams;
    this.#session = undefined;
    this.#awaySinceMs = performance.now();
    this.#streams = [];
    for (const stream of streams) {
      clearTimeout(stream.retry);
      if (stream.connection !== 0) this.#options.loops.disconnect(stream.connection);
    }
    const gone = this.#options.onGone();
    this.#failQueue();
    this.#note(error);
    // What it held goes slice by slice; it may not tell of it again before that.
    void gone.then(() => this.#later());
  }

  #note(error: KvError): void {
    this.#dialing = undefined;
    if (this.#closed) return;
    const { log, joinMs } = this.#options;
    const details = { peer: this.name, reason: error.message };
    const sinceMs = performance.now() - this.#sinceMs;
    const isNew = this.#reason !== error.message;
    const isWarning = this.#wasConnected || sinceMs >= joinMs;
    if (!isWarning && isNew) log.info(details, 'a peer is not connected yet');
    else if (this.#wasConnected && isNew) log.warn(details, 'a peer is not connected');
    else if (isWarning && (isNew || !this.#isWarned))
      log.warn({ ...details, forS: Math.round(sinceMs / 1000) }, 'a peer has never been connected');
    this.#isWarned = isWarning;
    this.#reason = error.message;
  }

  /** Try again, later each time, and not all nodes at once. */
  #later(): void {
    if (this.#closed) return;
    this.#retry = setTimeout(() => this.#dial(), this.#backoffMs(this.#failures++));
    this.#retry.unref();
  }

  #backoffMs(failures: number): number {
    return Math.min(this.#options.maxRetryMs, minRetryMs * 2 ** Math.min(failures, 16)) * (0.5 + Math.random() / 2);
  }

  #open(stream: Stream): void {
    const session = this.#session;
    if (session === undefined) return;
    const { host, dataPort, session: id, dataKey } = session;
    const onUp = (): void => {
      if (this.#session !== session) return;
      stream.up = true;
      stream.failures = 0;
      this.#pump();
    };
    try {
      const onDown = (end: ConnectionEnd): void => this.#down(session, stream, end);
      stream.connection = this.#options.loops.connect(host, dataPort, id, dataKey, { onUp, onDown });
    } catch (error) {
      // An interface that has gone, with an address that only it has.
      session.control.end(KvError.from(error));
    }
  }

  #down(session: Session, stream: Stream, end: ConnectionEnd): void {
    stream.up = false;
    stream.connection = 0;
    if (this.#session !== session) return;
    if (end === 'time limit') this.#suspect = true;
    if (!this.usable) this.#failQueue();
    stream.retry = setTimeout(() => this.#open(stream), this.#backoffMs(stream.failures++));
    stream.retry.unref();
  }

  #failQueue(): void {
    const queue = this.#queue;
    this.#queue = [];
    this.#queuedBytes = 0;
    this.#fail(queue);
  }

  #fail(orders: readonly Order<Blocks>[]): void {
    for (const { blocks, indexes, at } of orders) {
      for (let i = at; i < indexes.length; i++) this.#options.onFetched(blocks, indexes[i]!, 'failed');
    }
  }

  /** Give the streams what they may have in flight; the emptiest first. */
  #pump(): void {
    let hasRoom = true;
    while (hasRoom && this.#queue.length > 0) {
      const order = this.#queue[0]!;
      hasRoom = this.#take(order);
      if (order.at === order.indexes.length) this.#queue.shift();
      for (const stream of this.#streams) {
        if (stream.taken.length > 0) this.#send(stream, order.blocks);
      }
    }
    if (this.#queue.length > 0) this.#sweeper ??= setTimeout(() => this.#sweep(), sweepMs);
  }

  /** Divide what comes next of `order` among the streams. False: they have all that they may have. */
  #take(order: Order<Blocks>): boolean {
    const { blocks, indexes } = order;
    for (; order.at < indexes.length; order.at++) {
      const index = indexes[order.at]!;
      const bytes = blocks.slotBytes[index]!;
      const stream = this.#emptiest();
      if (stream === undefined || this.#blocksInFlight >= maxBlocksInFlight) return false;
      if (stream.inFlightBytes > 0 && stream.inFlightBytes + bytes > this.#options.windowBytes) return false;
      stream.taken.push(index);
      stream.inFlightBytes += bytes;
      this.#blocksInFlight++;
      this.#queuedBytes -= bytes;
    }
    return true;
  }

  #send(stream: Stream, blocks: Blocks): void {
    const { loops, onFetched } = this.#options;
    const indexes = stream.taken;
    stream.taken = [];
    loops.fetch(stream.connection, blocks, indexes, (index, result) => {
      stream.inFlightBytes -= blocks.slotBytes[index]!;
      this.#blocksInFlight--;
      onFetched(blocks, index, result);
      if (this.#queue.length > 0) this.#pumpSoon();
    });
  }

  /** Once for all fetches that end in one turn. */
  #pumpSoon(): void {
    if (this.#pumping) return;
    this.#pumping = true;
    queueMicrotask(() => {
      this.#pumping = false;
      this.#pump();
    });
  }

  #emptiest(): Stream | undefined {
    let best: Stream | undefined;
    for (const stream of this.#streams) {
      if (stream.up && (best === undefined || stream.inFlightBytes < best.inFlightBytes)) best = stream;
    }
    return best;
  }

  /** Blocks whose time is over while they wait. */
  #sweep(): void {
    this.#sweeper = undefined;
    const nowMs = performance.now();
    const queue = this.#queue;
    const late: Order<Blocks>[] = [];
    this.#queue = [];
    for (const { blocks, indexes, at } of queue) {
      const waiting = indexes.slice(at);
      const isLate = (index: number): boolean => blocks.deadlinesMs[index]! <= nowMs;
      late.push({ blocks, indexes: waiting.filter(isLate), at: 0 });
      const rest = waiting.filter((index) => !isLate(index));
      if (rest.length > 0) this.#queue.push({ blocks, indexes: rest, at: 0 });
    }
    for (const { blocks, indexes } of late) for (const index of indexes) this.#queuedBytes -= blocks.slotBytes[index]!;
    this.#fail(late);
    if (this.#queue.length > 0) this.#sweeper ??= setTimeout(() => this.#sweep(), sweepMs);
  }
}
