/**
 * Follows one publisher over ZeroMQ, ours or vLLM's of any version: an in-order stream of batches and notices
 * (continuity.ts says which). Memory is bounded by ZeroMQ's high-water mark: the stream is pulled, and what is dropped
 * while nobody pulls is asked for again. So is what an idle publisher said before we came, or last: after a while in which nothing
 * comes, its replay endpoint is asked whether there is more. A connection that stands and brings nothing of what is found so is made anew.
 * An endpoint that did not answer is asked beside the stream until it does, and so is one that answers replays, for a snapshot that it did
 * not tell: what comes waits for a silence once, and again only where somebody answers there, and then does not when asked in earnest.
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
import { Knock } from './knock.ts';
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
  /** For the first part of an answer: whose replay endpoint says nothing for so long is not there (5 s). */
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
  ...{ batches: 0, replayed: 0, gaps: 0, restarts: 0, snapshots: 0, repeated: 0, undecodable: 0, unanswered: 0 },
};
/** Waited for a whole answer: a cache node of millions of blocks takes its time. */
const answerMs = 60_000;
/** Between two parts of a replay: what breaks off is asked for again from there. A snapshot would begin anew. */
const pauseMs = 1_000;
/** Batches from here on nobody has: whoever answers says at once that there are none. */
const beyondAll = Number.MAX_SAFE_INTEGER;

export class KvEventSubscriber implements AsyncIterable<StreamItem> {
  readonly #at: EventReceiverOptions;
  #receiver: EventReceiver;
  readonly #replay: Replay | null;
  readonly #snapshot: Snapshot | null;
  /** Whether the endpoint answers again. */
  readonly #knock: Knock | null;
  /** Whether it tells a snapshot now. */
  readonly #snapshotKnock: Knock | null;
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
  /** Of snapshots that were not told, beside the stream. */
  readonly #snapshotProbing = new Probing(performance.now());
  readonly #deafness = new Deafness();
  #timer: NodeJS.Timeout | undefined;
  readonly #arrival = new Arrival<Burst | null>();

  /** Connects; the publisher may come later. Throws KvError CONFIG for an endpoint or a key that cannot be. */
  constructor(options: KvEventSubscriberOptions) {
    const { endpoint, replayEndpoint = null, topic = '', hwm = 10_000, heartbeatMs = 5_000, curve = null } = options;
    const maxMessageBytes = options.maxMessageBytes ?? 64 * 2 ** 20;
    const silenceMs = options.replayDeadlineMs ?? 5_000;
    const { signal } = this.#abort;
    this.#topic = topic;
    const limits = { deadlineMs: answerMs, silenceMs, pauseMs: Math.min(pauseMs, silenceMs), maxMessageBytes };
    const from = replayEndpoint === null ? null : { endpoint: replayEndpoint, ...limits, curve, signal };
    const whole = { pauseMs: silenceMs };
    const replay: Replay | null = from && ((fromSeq) => requestReplay({ ...from, fromSeq }));
    const snapshot: Snapshot | null = from && (() => requestReplay({ ...from, ...whole, fromSeq: 'snapshot' }));
    const onCame = (): void => this.#arrival.wake();
    this.#replay = replay;
    this.#snapshot = snapshot;
    this.#knock = replay && new Knock(() => replay(beyondAll), onCame);
    this.#snapshotKnock = snapshot && new Knock(snapshot, onCame);
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
        const isThere = yield* this.#knocked(continuity);
        const isProbing = this.#isProbeDue || isThere;
        this.#isProbeDue = false;
        if (isProbing && !isThere && continuity.counts.unanswered > 0) this.#knock?.begin();
        else if (isProbing) {
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
      this.#snapshotProbing.connected();
      this.#deafness.connected(performance.now());
      this.#probe();
    }
  }

  /** What came of knocking. True: somebody is there, to be asked in earnest. */
  *#knocked<Batch extends { readonly ts: number }>(
    continuity: Continuity<Batch>,
  ): Generator<readonly StreamItem<Batch>[], boolean> {
    const told = this.#snapshotKnock?.take();
    // Whatever came of it: until one is told in earnest, each question is later than the one before.
    if (told !== undefined) this.#snapshotProbing.unanswered(performance.now());
    if (told === 'answered') continuity.tells();
    const knocked = this.#knock?.take();
    if (knocked === 'unanswered') {
      this.#probing.unanswered(performance.now());
      for (const item of continuity.unanswered()) yield [item];
    }
    return knocked === 'answered' || told === 'answered';
  }

  #probe(): void {
    if (this.#replay === null) return;
    this.#isProbeDue = true;
    this.#arrival.wake();
  }

  #look(): void {
    if (!this.#isConnected || this.#continuity === undefined) return;
    const nowMs = performance.now();
    const { wantsProbe, awaitsSnapshot, counts } = this.#continuity;
    // Who speaks all the time is never idle; whether his endpoint answers again is to be known all the same.
    const isMissing = wantsProbe || counts.unanswered > 0;
    if (!this.#knock?.isUnderWay && this.#probing.isDue(nowMs, isMissing)) this.#probe();
    if (awaitsSnapshot && counts.unanswered === 0 && this.#snapshotProbing.isDue(nowMs, true))
      this.#snapshotKnock?.begin();
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
    if (after.snapshots > before.snapshots) this.#snapshotProbing.probed(performance.now(), true);
    if (after.unanswered > 0) this.#probing.unanswered(performance.now());
    else this.#probing.probed(performance.now(), isNew);
  }
}
