/**
 * Follows one publisher over ZeroMQ, ours or vLLM's of any version: an in-order stream of batches and notices
 * (continuity.ts says which). Memory is bounded by ZeroMQ's high-water mark: the stream is pulled, and what is dropped
 * while nobody pulls is asked for again. So is what an idle publisher said before we came, or last: after a while in which nothing
 * comes, its replay endpoint is asked whether there is more.
 */
import { KvError } from '@kvtier/errors';
import { Subscriber } from 'zeromq';
import { decodeBatch } from './codec.ts';
import { Continuity, type ContinuityCounts, type Replay, type Snapshot, type StreamItem } from './continuity.ts';
import { decodeSeq } from './frames.ts';
import { type PackedBatch, PackedDecoder } from './packed-decoder.ts';
import type { Published } from './replay-buffer.ts';
import { requestReplay } from './replay-client.ts';
import { applyCurveClient, type CurveClient } from './security.ts';

export interface KvEventSubscriberOptions {
  readonly endpoint: string;
  readonly replayEndpoint?: string | null;
  /** Batches whose topic begins so. Narrower than the publisher's own: correct, but the other batches come as replays. */
  readonly topic?: string;
  /** Batches that wait for us before ZeroMQ drops. */
  readonly hwm?: number;
  readonly replayDeadlineMs?: number;
  /** A larger message ends the connection to that publisher. */
  readonly maxMessageBytes?: number;
  readonly curve?: CurveClient | null;
}

export interface KvEventSubscriberStats extends ContinuityCounts {
  /** Messages that are not of this protocol. */
  readonly foreign: number;
  readonly disconnects: number;
}

/** What a consumer gets at once: no more of these, and none after so many bytes, so that its turn stays short. */
const maxBurst = 256;
const maxBurstBytes = 2 ** 20;
const noCounts: ContinuityCounts = {
  ...{ batches: 0, replayed: 0, gaps: 0, restarts: 0, snapshots: 0, repeated: 0, undecodable: 0 },
};
/** After so long without a batch the publisher is asked whether there was one; twice as long after each time that there was none. */
const idleMs = 2_000;
const maxIdleMs = 30_000;
/** What is missing is asked for at most so often; a new connection is looked after once more when its subscription has surely arrived. */
const probeMs = 500;
/** For a whole snapshot: a cache node of millions of blocks takes its time. */
const snapshotDeadlineMs = 60_000;

export class KvEventSubscriber implements AsyncIterable<StreamItem> {
  readonly #socket: Subscriber;
  readonly #replay: Replay | null;
  readonly #snapshot: Snapshot | null;
  readonly #topic: string;
  #continuity: Continuity<{ readonly ts: number }> | undefined;
  readonly #abort = new AbortController();
  #foreign = 0;
  #disconnects = 0;
  #isConnected = false;
  #isProbeDue = false;
  #heardMs = performance.now();
  #probedMs = Number.NEGATIVE_INFINITY;
  #idleMs = idleMs;
  #timer: NodeJS.Timeout | undefined;
  #wake: (() => void) | undefined;

  /** Connects; the publisher may come later. Throws KvError CONFIG for an endpoint or a key that cannot be. */
  constructor(options: KvEventSubscriberOptions) {
    const { endpoint, replayEndpoint = null, topic = '', hwm = 10_000, curve = null } = options;
    const maxMessageBytes = options.maxMessageBytes ?? 64 * 2 ** 20;
    const deadlineMs = options.replayDeadlineMs ?? 5_000;
    const { signal } = this.#abort;
    this.#topic = topic;
    const from = replayEndpoint === null ? null : { endpoint: replayEndpoint, maxMessageBytes, curve, signal };
    this.#replay = from && ((fromSeq) => requestReplay({ ...from, fromSeq, deadlineMs }));
    this.#snapshot = from && (() => requestReplay({ ...from, fromSeq: 'snapshot', deadlineMs: snapshotDeadlineMs }));
    this.#socket = new Subscriber({ linger: 0, receiveHighWaterMark: hwm, maxMessageSize: maxMessageBytes });
    try {
      applyCurveClient(this.#socket, curve);
      this.#socket.ipv6 = endpoint.includes('[');
      this.#socket.events.on('disconnect', () => {
        this.#continuity?.suspect();
        this.#disconnects++;
        this.#isConnected = false;
      });
      this.#socket.events.on('handshake', () => {
        this.#isConnected = true;
        this.#idleMs = 0;
        this.#probe();
      });
      this.#socket.subscribe(topic);
      this.#socket.connect(endpoint);
    } catch (error) {
      this.#socket.close();
      if (error instanceof KvError) throw error;
      const { message } = error as Error;
      throw new KvError(
        'CONFIG',
        `${endpoint}: cannot be subscribed to (${message}); write tcp://HOST:PORT or ipc://PATH`,
      );
    }
  }

  /** Whether there is a connection to the publisher now. */
  get connected(): boolean {
    return this.#isConnected;
  }

  /** All that the publisher holds is asked for anew, if it can tell. */
  resync(): void {
    this.#continuity?.resync();
    this.#probe();
  }

  stats(): KvEventSubscriberStats {
    return { ...(this.#continuity?.counts ?? noCounts), foreign: this.#foreign, disconnects: this.#disconnects };
  }

  /** Ends the iteration. */
  close(): void {
    this.#abort.abort();
    clearInterval(this.#timer);
    if (!this.#socket.closed) this.#socket.close();
  }

  /** To be iterated once, so or as `packed`. Never throws for what a publisher sends. */
  async *[Symbol.asyncIterator](): AsyncGenerator<StreamItem> {
    for await (const burst of this.#bursts(decodeBatch)) yield* burst;
  }

  /**
   * The same with batches as words, and as many at once as have arrived: for those who follow many publishers. `tokens`: with the ids of tokens.
   * To be iterated once.
   */
  packed(options: { readonly tokens?: boolean } = {}): AsyncGenerator<readonly StreamItem<PackedBatch>[]> {
    const decoder = new PackedDecoder(options);
    return this.#bursts((payload) => decoder.decode(payload));
  }

  async *#bursts<Batch extends { readonly ts: number }>(
    decode: (payload: Uint8Array) => Batch,
  ): AsyncGenerator<readonly StreamItem<Batch>[]> {
    const continuity = new Continuity(decode, { replay: this.#replay, snapshot: this.#snapshot }, this.#topic);
    this.#continuity = continuity;
    if (this.#replay !== null) this.#timer = setInterval(() => this.#look(), probeMs).unref();
    let receiving: Promise<Buffer[]> | undefined;
    let burst: StreamItem<Batch>[] = [];
    let bytes = 0;
    try {
      for (;;) {
        if (this.#isProbeDue) {
          this.#isProbeDue = false;
          if (burst.length > 0) yield burst;
          burst = [];
          const before = continuity.counts;
          for await (const item of continuity.probe()) yield [item];
          this.#probed(before, continuity.counts);
        }
        // While there are some, nobody has to wake us.
        const isReady = this.#socket.readable;
        receiving ??= this.#socket.receive();
        const frames = isReady ? await receiving : await this.#either(receiving);
        if (frames === undefined) continue;
        receiving = undefined;
        this.#heardMs = performance.now();
        this.#idleMs = idleMs;
        const one = publishedIn(frames);
        if (one === undefined) {
          this.#foreign++;
        } else if (continuity.continues(one)) {
          const item = continuity.next(one);
          if (item) burst.push(item);
          bytes += one.payload.length;
        } else {
          // A replay may take its time: what was there before does not wait for it.
          if (burst.length > 0) yield burst;
          burst = [];
          for await (const item of continuity.arrived(one)) yield [item];
        }
        // Nobody waits with what has arrived for what has not.
        if (burst.length === 0 || (burst.length < maxBurst && bytes < maxBurstBytes && this.#socket.readable)) continue;
        yield burst;
        burst = [];
        bytes = 0;
      }
    } catch (error) {
      if (!this.#socket.closed) throw error;
    } finally {
      this.close();
    }
  }

  /** undefined: a probe is due. */
  async #either(receiving: Promise<Buffer[]>): Promise<Buffer[] | undefined> {
    if (this.#isProbeDue) return undefined;
    const woken = new Promise<undefined>((resolve) => {
      this.#wake = () => resolve(undefined);
    });
    return Promise.race([receiving, woken]);
  }

  #probe(): void {
    if (this.#replay === null) return;
    this.#isProbeDue = true;
    this.#wake?.();
  }

  #look(): void {
    const now = performance.now();
    if (!this.#isConnected || now - this.#probedMs < probeMs) return;
    const quietMs = now - Math.max(this.#heardMs, this.#probedMs);
    if (this.#continuity?.wantsProbe === true || quietMs >= this.#idleMs) this.#probe();
  }

  #probed(before: ContinuityCounts, after: ContinuityCounts): void {
    this.#probedMs = performance.now();
    const brought = after.replayed + after.snapshots > before.replayed + before.snapshots;
    this.#idleMs = brought ? idleMs : Math.min(Math.max(idleMs, this.#idleMs * 2), maxIdleMs);
  }
}

/** undefined: no message of this protocol. */
function publishedIn(frames: readonly Buffer[]): Published | undefined {
  if (frames.length !== 3) return undefined;
  const seq = decodeSeq(frames[1]);
  return seq === undefined ? undefined : { seq, topic: frames[0]!.toString(), payload: frames[2]! };
}
