/**
 * Follows one publisher over ZeroMQ, ours or vLLM's of any version: an in-order stream of batches and notices
 * (continuity.ts says which). Memory is bounded by ZeroMQ's high-water mark: the stream is pulled, and what is dropped
 * while nobody pulls is asked for again. So is what an idle publisher said before we came, or last: after a while in which nothing
 * comes, its replay endpoint is asked whether there is more. A connection that stands and brings nothing of what is found so is made anew.
 */
import { InvariantError } from '@kvtier/errors';
import { Arrival } from './arrival.ts';
import { decodeBatch } from './codec.ts';
import {
  Continuity,
  type ContinuityCounts,
  type ContinuitySources,
  type Replay,
  type Snapshot,
  type StreamItem,
} from './continuity.ts';
import { Deafness } from './deafness.ts';
import { type PackedBatch, PackedDecoder } from './packed-decoder.ts';
import { Probing, probeMs } from './probing.ts';
import { type Burst, EventReceiver, type EventReceiverOptions, messagesOf } from './receiver.ts';
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
  /** Whose host answers to none of two such signs of life is connected to anew (5 s). */
  readonly heartbeatMs?: number;
  readonly curve?: CurveClient | null;
}

export interface KvEventSubscriberStats extends ContinuityCounts {
  /** Messages that are not of this protocol. */
  readonly foreign: number;
  readonly disconnects: number;
  /** Connections made anew as the one before brought nothing of what the publisher said. */
  readonly reconnects: number;
}

const noCounts: ContinuityCounts = {
  ...{ batches: 0, replayed: 0, gaps: 0, restarts: 0, snapshots: 0, repeated: 0, undecodable: 0 },
};
/** For a whole snapshot: a cache node of millions of blocks takes its time. */
const snapshotDeadlineMs = 60_000;

export class KvEventSubscriber implements AsyncIterable<StreamItem> {
  readonly #at: EventReceiverOptions;
  #receiver: EventReceiver;
  readonly #replay: Replay | null;
  readonly #snapshot: Snapshot | null;
  readonly #topic: string;
  #continuity: Continuity<{ readonly ts: number }> | undefined;
  readonly #abort = new AbortController();
  #foreign = 0;
  #disconnects = 0;
  #reconnects = 0;
  #isConnected = false;
  /** A connection has ended, and there is no other yet. */
  #wasCut = false;
  #isProbeDue = false;
  readonly #probing = new Probing(performance.now());
  readonly #deafness = new Deafness();
  #timer: NodeJS.Timeout | undefined;
  readonly #arrival = new Arrival<Burst | null>();

  /** Connects; the publisher may come later. Throws KvError CONFIG for an endpoint or a key that cannot be. */
  constructor(options: KvEventSubscriberOptions) {
    const { endpoint, replayEndpoint = null, topic = '', hwm = 10_000, heartbeatMs = 5_000, curve = null } = options;
    const maxMessageBytes = options.maxMessageBytes ?? 64 * 2 ** 20;
    const deadlineMs = options.replayDeadlineMs ?? 5_000;
    const { signal } = this.#abort;
    this.#topic = topic;
    const from = replayEndpoint === null ? null : { endpoint: replayEndpoint, maxMessageBytes, curve, signal };
    const limits = { deadlineMs, silenceMs: deadlineMs };
    this.#replay = from && ((fromSeq) => requestReplay({ ...from, ...limits, fromSeq }));
    const whole = { ...limits, deadlineMs: snapshotDeadlineMs };
    this.#snapshot = from && (() => requestReplay({ ...from, ...whole, fromSeq: 'snapshot' }));
    this.#at = { endpoint, topic, hwm, maxMessageBytes, heartbeatMs, curve };
    this.#receiver = new EventReceiver(this.#at);
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
    const counts = this.#continuity?.counts ?? noCounts;
    return { ...counts, foreign: this.#foreign, disconnects: this.#disconnects, reconnects: this.#reconnects };
  }

  /** Ends the iteration. */
  close(): void {
    this.#abort.abort();
    clearInterval(this.#timer);
    this.#receiver.close();
  }

  /** To be iterated once, so or as `packed`. Never throws for what a publisher sends. */
  async *[Symbol.asyncIterator](): AsyncGenerator<StreamItem> {
    const undecoded = (): never => {
      throw new InvariantError('kv events: decoded, though payloads were asked for');
    };
    const continuity = new Continuity(decodeBatch, this.#sources, this.#topic);
    for await (const items of this.#bursts(continuity, () => this.#receiver.next(null, false), undecoded)) yield* items;
  }

  /**
   * The same with batches as words, and as many at once as have arrived: for those who follow many publishers. `tokens`: with the ids of tokens.
   * To be iterated once. The words of a burst are used again when the next one is asked for.
   */
  packed({ tokens = false }: { readonly tokens?: boolean } = {}): AsyncGenerator<readonly StreamItem<PackedBatch>[]> {
    const decoder = new PackedDecoder({ tokens });
    const continuity = new Continuity((payload) => decoder.decode(payload), this.#sources, this.#topic);
    const next = (): Promise<Burst | null> => this.#receiver.next(decoder.encodedNames, tokens);
    return this.#bursts(continuity, next, (words, from) => decoder.batchAt(words, from));
  }

  get #sources(): ContinuitySources {
    return { replay: this.#replay, snapshot: this.#snapshot };
  }

  async *#bursts<Batch extends { readonly ts: number }>(
    continuity: Continuity<Batch>,
    next: () => Promise<Burst | null>,
    batchAt: (words: Int32Array, from: number) => Batch,
  ): AsyncGenerator<readonly StreamItem<Batch>[]> {
    this.#continuity = continuity;
    if (this.#replay !== null) this.#timer = setInterval(() => this.#look(), probeMs).unref();
    const arrival = this.#arrival;
    try {
      for (;;) {
        if (!arrival.isBegun) arrival.begin(next());
        const isProbing = this.#isProbeDue;
        if (isProbing) {
          this.#isProbeDue = false;
          const [sinceMs, before] = [performance.now(), continuity.counts];
          for await (const item of continuity.probe()) yield [item];
          this.#probed(sinceMs, before, continuity.counts);
        }
        // What came during a probe goes before the next one: it may say that there is nobody to ask.
        if (!isProbing && !this.#isProbeDue) await arrival.wait();
        const burst = arrival.take();
        if (burst === null) return;
        if (burst === undefined) {
          if (this.#isDeaf()) {
            this.#connectAnew();
            arrival.drop(); // it is of the one before, which is closed
          }
          continue;
        }
        arrival.begin(next()); // decoded while these are used
        this.#link(burst, continuity);
        let items: StreamItem<Batch>[] = [];
        for (const one of messagesOf(burst, batchAt)) {
          if (continuity.continues(one)) {
            const item = continuity.next(one);
            if (item) items.push(item);
            continue;
          }
          // A replay may take its time: what was there before does not wait for it.
          if (items.length > 0) yield items;
          items = [];
          for await (const item of continuity.arrived(one)) yield [item];
        }
        if (items.length > 0) yield items;
      }
    } finally {
      this.close();
    }
  }

  /** What a burst says of the connection. */
  #link({ messages, foreign, disconnects, handshakes, connected }: Burst, continuity: { suspect(): void }): void {
    this.#foreign += foreign;
    this.#disconnects += disconnects;
    this.#isConnected = connected;
    if (messages > 0 || foreign > 0) {
      this.#probing.heard(performance.now());
      this.#deafness.heard();
    }
    if (disconnects > 0) this.#wasCut = true;
    if (handshakes > 0) {
      // What comes before it was sent in the connection that is gone: to ask for that again would be to ask nobody.
      if (this.#wasCut) continuity.suspect();
      this.#wasCut = false;
      this.#probing.connected();
      this.#deafness.connected(performance.now());
      this.#probe();
    }
  }

  #probe(): void {
    if (this.#replay === null) return;
    this.#isProbeDue = true;
    this.#arrival.wake();
  }

  #look(): void {
    const isMissing = this.#continuity?.wantsProbe === true;
    if (this.#isConnected && this.#probing.isDue(performance.now(), isMissing)) this.#probe();
  }

  #isDeaf(): boolean {
    return this.#isConnected && !this.#abort.signal.aborted && this.#deafness.isDue(performance.now());
  }

  /** With the keys of now. What is said meanwhile is asked for when the connection stands. */
  #connectAnew(): void {
    const before = this.#receiver;
    this.#receiver = new EventReceiver(this.#at);
    before.close();
    this.#reconnects++;
    this.#isConnected = false;
    this.#wasCut = true;
  }

  #probed(sinceMs: number, before: ContinuityCounts, after: ContinuityCounts): void {
    this.#deafness.probed(sinceMs, after.batches - before.batches);
    const isNew = after.replayed + after.snapshots > before.replayed + before.snapshots;
    this.#probing.probed(performance.now(), isNew);
  }
}
