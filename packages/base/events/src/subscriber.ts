/**
 * Follows one publisher over ZeroMQ, ours or vLLM's of any version: an in-order stream of batches and notices
 * (continuity.ts says which). Memory is bounded by ZeroMQ's high-water mark: the stream is pulled, and what is dropped
 * while nobody pulls is asked for again.
 */
import type { KvEventBurst } from '@kvtier/data-plane';
import { InvariantError } from '@kvtier/errors';
import { decodeBatch } from './codec.ts';
import { Continuity, type ContinuityCounts, type Replay, type StreamItem } from './continuity.ts';
import { type PackedBatch, PackedDecoder } from './packed-decoder.ts';
import { EventReceiver, messagesOf } from './receiver.ts';
import { requestReplay } from './replay-client.ts';
import type { CurveClient } from './security.ts';

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

const noCounts: ContinuityCounts = { batches: 0, replayed: 0, gaps: 0, restarts: 0, undecodable: 0 };

export class KvEventSubscriber implements AsyncIterable<StreamItem> {
  readonly #receiver: EventReceiver;
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
    this.#receiver = new EventReceiver({ endpoint, topic, hwm, maxMessageBytes, curve });
  }

  stats(): KvEventSubscriberStats {
    return { ...(this.#continuity?.counts ?? noCounts), foreign: this.#foreign, disconnects: this.#disconnects };
  }

  /** Ends the iteration. */
  close(): void {
    this.#abort.abort();
    this.#receiver.close();
  }

  /** To be iterated once, so or as `packed`. Never throws for what a publisher sends. */
  async *[Symbol.asyncIterator](): AsyncGenerator<StreamItem> {
    const undecoded = (): never => {
      throw new InvariantError('kv events: decoded, though payloads were asked for');
    };
    const continuity = new Continuity(decodeBatch, this.#replay, this.#topic);
    for await (const items of this.#bursts(continuity, () => this.#receiver.next(null, false), undecoded)) yield* items;
  }

  /**
   * The same with batches as words, and as many at once as have arrived: for those who follow many publishers. `tokens`: with the ids of tokens.
   * To be iterated once.
   */
  packed({ tokens = false }: { readonly tokens?: boolean } = {}): AsyncGenerator<readonly StreamItem<PackedBatch>[]> {
    const decoder = new PackedDecoder({ tokens });
    const continuity = new Continuity((payload) => decoder.decode(payload), this.#replay, this.#topic);
    const next = (): Promise<KvEventBurst | null> => this.#receiver.next(decoder.encodedNames, tokens);
    return this.#bursts(continuity, next, (words, from) => decoder.batchAt(words, from));
  }

  async *#bursts<Batch>(
    continuity: Continuity<Batch>,
    next: () => Promise<KvEventBurst | null>,
    batchAt: (words: Int32Array, from: number) => Batch,
  ): AsyncGenerator<readonly StreamItem<Batch>[]> {
    this.#continuity = continuity;
    try {
      for (;;) {
        const burst = await next();
        if (burst === null) return;
        this.#foreign += burst.foreign;
        this.#disconnects += burst.disconnects;
        if (burst.disconnects > 0) continuity.suspect();
        const items: StreamItem<Batch>[] = [];
        for (const one of messagesOf(burst, batchAt)) {
          if (continuity.continues(one)) {
            const item = continuity.next(one);
            if (item) items.push(item);
          } else {
            for await (const item of continuity.arrived(one)) yield [item];
          }
        }
        if (items.length > 0) yield items;
      }
    } finally {
      this.close();
    }
  }
}
