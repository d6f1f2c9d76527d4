/**
 * One peer, seen from the node that fetches: its control connection, which comes back by itself, and its streams, over which
 * blocks come. Invariants: at most `windowBytes` in flight on one stream; a job ends exactly once, within its deadline; when
 * the control connection ends, so do the streams.
 */
import { Buffer } from 'node:buffer';
import { isIP } from 'node:net';
import { KvError } from '@kvtier/errors';
import type { DiskLog } from '../disk/options.ts';
import { type Control, dial, type PeerSecurity } from './control.ts';
import type { ConnectionEnd, FetchResult, PeerEngine } from './engine.ts';
import type { ChangeMessage, Message } from './frames.ts';
import { silentHeartbeats } from './peer-server.ts';

export interface PeerAddress {
  readonly host: string;
  readonly port: number;
}

export interface RemotePeerOptions {
  readonly address: PeerAddress;
  readonly engine: PeerEngine;
  readonly security: PeerSecurity;
  readonly epoch: bigint;
  readonly log: DiskLog;
  readonly streams: number;
  readonly windowBytes: number;
  readonly maxRetryMs: number;
  readonly onChange: (change: ChangeMessage) => void;
  /** Everything that it held is gone from sight. */
  readonly onGone: () => void;
}

/** One block on its way. */
export interface FetchJob {
  readonly slot: number;
  readonly slotBytes: number;
  /** Namespace digest, hash zero padded. */
  readonly identity: Buffer;
  /** On the clock of performance.now(). */
  readonly deadlineMs: number;
  readonly onDone: (result: FetchResult) => void;
}

interface Stream {
  connection: number;
  up: boolean;
  inFlightBytes: number;
  failures: number;
  retry: NodeJS.Timeout | undefined;
}

interface Session {
  readonly control: Control;
  readonly host: string;
  readonly dataPort: number;
  readonly session: Buffer;
  readonly dataKey: Buffer;
}

const minRetryMs = 100;
/** What the native side takes unanswered on one connection is 1024. */
const maxJobsInFlight = 512;

export class RemotePeer {
  readonly #options: RemotePeerOptions;
  #session: Session | undefined;
  #dialing: Control | undefined;
  #streams: Stream[] = [];
  #queue: FetchJob[] = [];
  #queuedBytes = 0;
  #jobsInFlight = 0;
  #failures = 0;
  #retry: NodeJS.Timeout | undefined;
  #sweeper: NodeJS.Timeout | undefined;
  #closed = false;
  #pumping = false;
  /** It let a fetch run into its limit and has said nothing since. */
  #suspect = false;
  #listed = false;
  #reason = 'not connected yet';

  constructor(options: RemotePeerOptions) {
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

  /** Why it is not connected; "" when it is. */
  get reason(): string {
    return this.connected ? '' : this.#reason;
  }

  /** Bytes asked for and not yet here. */
  get loadBytes(): number {
    return this.#queuedBytes + this.#streams.reduce((sum, { inFlightBytes }) => sum + inFlightBytes, 0);
  }

  fetch(jobs: readonly FetchJob[]): void {
    if (!this.usable) {
      for (const { onDone } of jobs) onDone('failed');
      return;
    }
    for (const job of jobs) {
      this.#queue.push(job);
      this.#queuedBytes += job.slotBytes;
    }
    this.#pump();
  }

  hint(message: Message): void {
    this.#session?.control.send(message);
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
    const { address, security, epoch } = this.#options;
    const remember = (control: Control): void => {
      this.#dialing = control;
    };
    dial(address.host, address.port, security, epoch, remember).then(
      (proven) => this.#connected(proven),
      (error: unknown) => this.#lost(KvError.from(error, 'PROTOCOL')),
    );
  }

  #connected(proven: Awaited<ReturnType<typeof dial>>): void {
    const { control, session, dataPort, dataKey, heartbeatMs, peerEpoch } = proven;
    this.#dialing = undefined;
    const host = control.socket.remoteAddress ?? '';
    if (this.#closed || isIP(host) === 0) {
      control.end(new KvError('DISCONNECTED', 'peer: this node is closing'));
      return;
    }
    this.#session = { control, host, dataPort, session, dataKey };
    this.#suspect = false;
    this.#listed = false;
    this.#failures = 0;
    let sequence = 0;
    let heardMs = performance.now();
    const watchMs = Math.min(60_000, Math.max(10, heartbeatMs));
    const watch = setInterval(() => {
      if (performance.now() - heardMs <= silentHeartbeats * watchMs) return;
      control.end(new KvError('DEADLINE', `peer ${this.name}: nothing heard of it; see whether that node hangs`));
    }, watchMs);
    watch.unref();
    control.onEnd((error) => {
      clearInterval(watch);
      this.#ended(error);
    });
    control.listen((message) => {
      heardMs = performance.now();
      this.#suspect = false;
      if (message.kind === 'ping') control.send({ kind: 'pong' });
      else if (message.kind === 'change' && message.sequence === ++sequence) this.#options.onChange(message);
      else if (message.kind === 'listed') this.#listed = true;
      else {
        control.end(new KvError('PROTOCOL', `peer ${this.name}: it speaks out of turn; run nodes of one version`));
      }
    });
    if (control.ended) return;
    this.#streams = Array.from({ length: this.#options.streams }, () => ({
      ...{ connection: 0, up: false, inFlightBytes: 0, failures: 0, retry: undefined },
    }));
    for (const stream of this.#streams) this.#open(stream);
    this.#options.log.info({ peer: this.name, epoch: peerEpoch.toString(16) }, 'connected to a peer');
  }

  #ended(error: KvError): void {
    const streams = this.#streams;
    this.#session = undefined;
    this.#streams = [];
    for (const stream of streams) {
      clearTimeout(stream.retry);
      if (stream.connection !== 0) this.#options.engine.disconnect(stream.connection);
    }
    this.#options.onGone();
    this.#failQueue();
    this.#lost(error);
  }

  /** Try again, later each time, and not all nodes at once. */
  #lost(error: KvError): void {
    this.#dialing = undefined;
    if (this.#closed) return;
    if (this.#reason !== error.message) {
      this.#options.log.warn({ peer: this.name, reason: error.message }, 'a peer is not connected');
    }
    this.#reason = error.message;
    this.#retry = setTimeout(() => this.#dial(), this.#backoffMs(this.#failures++));
    this.#retry.unref();
  }

  #backoffMs(failures: number): number {
    return Math.min(this.#options.maxRetryMs, minRetryMs * 2 ** Math.min(failures, 16)) * (0.5 + Math.random() / 2);
  }

  #open(stream: Stream): void {
    const session = this.#session;
    if (session === undefined) return;
    stream.connection = this.#options.engine.connect(session.host, session.dataPort, session.session, session.dataKey, {
      onUp: () => {
        if (this.#session !== session) return;
        stream.up = true;
        stream.failures = 0;
        this.#pump();
      },
      onDown: (end) => this.#down(session, stream, end),
    });
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
    for (const { onDone } of queue) onDone('failed');
  }

  /** Give the streams what they may have in flight; the emptiest first. */
  #pump(): void {
    const { engine, windowBytes } = this.#options;
    const batches = new Map<Stream, FetchJob[]>();
    let taken = 0;
    for (const job of this.#queue) {
      const stream = this.#emptiest();
      if (stream === undefined || this.#jobsInFlight >= maxJobsInFlight) break;
      if (stream.inFlightBytes > 0 && stream.inFlightBytes + job.slotBytes > windowBytes) break;
      stream.inFlightBytes += job.slotBytes;
      this.#jobsInFlight++;
      const batch = batches.get(stream);
      if (batch === undefined) batches.set(stream, [job]);
      else batch.push(job);
      this.#queuedBytes -= job.slotBytes;
      taken++;
    }
    if (taken > 0) this.#queue = this.#queue.slice(taken);
    const nowMs = performance.now();
    for (const [stream, batch] of batches) {
      const rows = batch.map(({ slot, slotBytes, deadlineMs, onDone }) => ({
        slot,
        slotBytes,
        limitMs: Math.max(1, Math.ceil(deadlineMs - nowMs)),
        onDone: (result: FetchResult) => {
          stream.inFlightBytes -= slotBytes;
          this.#jobsInFlight--;
          onDone(result);
          if (this.#queue.length > 0) this.#pumpSoon();
        },
      }));
      engine.fetch(stream.connection, rows, Buffer.concat(batch.map(({ identity }) => identity)));
    }
    if (this.#queue.length > 0) this.#sweeper ??= setTimeout(() => this.#sweep(), 50);
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

  /** Jobs whose time is over while they wait. */
  #sweep(): void {
    this.#sweeper = undefined;
    const nowMs = performance.now();
    const late = this.#queue.filter(({ deadlineMs }) => deadlineMs <= nowMs);
    if (late.length > 0) {
      this.#queue = this.#queue.filter(({ deadlineMs }) => deadlineMs > nowMs);
      for (const { slotBytes } of late) this.#queuedBytes -= slotBytes;
      for (const { onDone } of late) onDone('failed');
    }
    if (this.#queue.length > 0) this.#sweeper ??= setTimeout(() => this.#sweep(), 50);
  }
}
