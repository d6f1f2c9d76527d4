/**
 * Follows one publisher over ZeroMQ, ours or vLLM's of any version: an in-order stream of batches and notices
 * (continuity.ts says which). Memory is bounded by ZeroMQ's high-water mark: the stream is pulled, and what is dropped
 * while nobody pulls is asked for again.
 */
import { KvError } from '@kvtier/errors';
import { Subscriber } from 'zeromq';
import { Continuity, type ContinuityCounts, type StreamItem } from './continuity.ts';
import { decodeSeq } from './frames.ts';
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

export class KvEventSubscriber implements AsyncIterable<StreamItem> {
  readonly #socket: Subscriber;
  readonly #continuity: Continuity;
  readonly #abort = new AbortController();
  #foreign = 0;
  #disconnects = 0;

  /** Connects; the publisher may come later. Throws KvError CONFIG for an endpoint or a key that cannot be. */
  constructor(options: KvEventSubscriberOptions) {
    const { endpoint, replayEndpoint = null, topic = '', hwm = 10_000, curve = null } = options;
    const maxMessageBytes = options.maxMessageBytes ?? 64 * 2 ** 20;
    const deadlineMs = options.replayDeadlineMs ?? 5_000;
    const { signal } = this.#abort;
    this.#continuity = new Continuity(
      replayEndpoint === null
        ? null
        : (fromSeq) => requestReplay({ endpoint: replayEndpoint, fromSeq, deadlineMs, maxMessageBytes, curve, signal }),
      topic,
    );
    this.#socket = new Subscriber({ linger: 0, receiveHighWaterMark: hwm, maxMessageSize: maxMessageBytes });
    try {
      applyCurveClient(this.#socket, curve);
      this.#socket.ipv6 = endpoint.includes('[');
      this.#socket.events.on('disconnect', () => {
        this.#continuity.suspect();
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
    return { ...this.#continuity.counts, foreign: this.#foreign, disconnects: this.#disconnects };
  }

  /** Ends the iteration. */
  close(): void {
    this.#abort.abort();
    if (!this.#socket.closed) this.#socket.close();
  }

  /** To be iterated once. Never throws for what a publisher sends. */
  async *[Symbol.asyncIterator](): AsyncGenerator<StreamItem> {
    try {
      for await (const [topic, seqFrame, payload, ...more] of this.#socket) {
        const seq = decodeSeq(seqFrame);
        if (seq === undefined || payload === undefined || more.length > 0) this.#foreign++;
        else yield* this.#continuity.arrived({ seq, topic: topic!.toString(), payload });
      }
    } finally {
      this.close();
    }
  }
}
