/**
 * Follows one publisher over ZeroMQ, ours or vLLM's of any version: an in-order stream of batches and notices
 * (continuity.ts says which). Memory is bounded by ZeroMQ's high-water mark: the stream is pulled, and what is dropped
 * while nobody pulls is asked for again.
 */
import { KvError } from '@kvtier/errors';
import { Subscriber } from 'zeromq';
import { decodeBatch } from './codec.ts';
import { Continuity, type ContinuityCounts, type Replay, type StreamItem } from './continuity.ts';
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
const noCounts: ContinuityCounts = { batches: 0, replayed: 0, gaps: 0, restarts: 0, undecodable: 0 };

export class KvEventSubscriber implements AsyncIterable<StreamItem> {
  readonly #socket: Subscriber;
  readonly #replay: Replay | null;
  readonly #topic: string;
  #continuity: Continuity<unknown> | undefined;
  readonly #abort = new AbortController();
  #foreign = 0;
  #disconnects = 0;

  /** Connects; the publisher may come later. Throws KvError CONFIG for an endpoint or a key that cannot be. */
  constructor(options: KvEventSubscriberOptions) {
    const { endpoint, replayEndpoint = null, topic = '', hwm = 10_000, curve = null } = options;
    const maxMessageBytes = options.maxMessageBytes ?? 64 * 2 ** 20;
    const deadlineMs = options.replayDeadlineMs ?? 5_000;
    const { signal } = this.#abort;
    this.#topic = topic;
    this.#replay =
      replayEndpoint === null
        ? null
        : (fromSeq) => requestReplay({ endpoint: replayEndpoint, fromSeq, deadlineMs, maxMessageBytes, curve, signal });
    this.#socket = new Subscriber({ linger: 0, receiveHighWaterMark: hwm, maxMessageSize: maxMessageBytes });
    try {
      applyCurveClient(this.#socket, curve);
      this.#socket.ipv6 = endpoint.includes('[');
      this.#socket.events.on('disconnect', () => {
        this.#continuity?.suspect();
        this.#disconnects++;
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

  stats(): KvEventSubscriberStats {
    return { ...(this.#continuity?.counts ?? noCounts), foreign: this.#foreign, disconnects: this.#disconnects };
  }

  /** Ends the iteration. */
  close(): void {
    this.#abort.abort();
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

  async *#bursts<Batch>(decode: (payload: Uint8Array) => Batch): AsyncGenerator<readonly StreamItem<Batch>[]> {
    const continuity = new Continuity(decode, this.#replay, this.#topic);
    this.#continuity = continuity;
    let burst: StreamItem<Batch>[] = [];
    let bytes = 0;
    try {
      for (;;) {
        const one = publishedIn(await this.#socket.receive());
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
}

/** undefined: no message of this protocol. */
function publishedIn(frames: readonly Buffer[]): Published | undefined {
  if (frames.length !== 3) return undefined;
  const seq = decodeSeq(frames[1]);
  return seq === undefined ? undefined : { seq, topic: frames[0]!.toString(), payload: frames[2]! };
}
