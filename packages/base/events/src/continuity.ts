/**
 * Makes one in-order stream of what arrives from a publisher and of what it replays, with a notice wherever the stream does
 * not continue what was before.
 *
 *   seq 0 1 2 . . 5 6        3 and 4 are asked for again; where the publisher no longer has them it is asked for all that it
 *                            holds ('snapshot'), and who cannot tell that leaves a 'gap'
 *   seq 7 8 9 0 1            the publisher started again: 'restarted', its state before is void
 *   seq 7 8 9 8              said before (not later than what we have, by the publisher's own clock): nothing
 *
 * Invariant: whoever applies the batches, and forgets all it knew of this publisher at each notice, never knows more than
 * what the publisher said in its present life, and knows all of that which it can still replay; of a publisher that tells snapshots, all.
 *
 * A publisher may restart while we are not connected, and then the number that we expect may come again. So a replay
 * begins with the last batch that we have, which must be the same byte for byte; `suspect` asks for that before the next
 * batch, and `probe` at once: the last batch may be the one that was lost. Knows nothing of sockets, so that tests can lose and restart
 * at will.
 */
import { KvError } from '@kvtier/errors';
import type { KvEventBatch } from './event.ts';
import type { Published, Replayed } from './replay-buffer.ts';

/** `Batch`: the form in which batches are wanted. */
export type StreamItem<Batch = KvEventBatch> =
  | { readonly kind: 'batch'; readonly seq: number; readonly topic: string; readonly batch: Batch }
  /** Batches fromSeq ... untilSeq - 1 are lost. None: only that nothing was missed could not be shown. */
  | {
      readonly kind: 'gap';
      readonly fromSeq: number;
      readonly untilSeq: number;
      readonly reason: string;
      /** It came, and could not be read. */
      readonly isUnread?: true;
    }
  /** A new life of the publisher: it holds nothing of what it said up to lastSeq. */
  | { readonly kind: 'restarted'; readonly lastSeq: number }
  /** What was said before is void; all that the publisher holds as of batch `seq` follows, as batches. */
  | { readonly kind: 'snapshot'; readonly seq: number };

/** A batch as it arrives. */
export interface Arrived<Batch> extends Published {
  /** Decoded where it was received; undefined: it is decoded here. */
  readonly batch?: Batch | undefined;
}

export interface ContinuityCounts {
  readonly batches: number;
  /** Of these, replayed. */
  readonly replayed: number;
  readonly gaps: number;
  readonly restarts: number;
  readonly snapshots: number;
  /** Came once more, or late. */
  readonly repeated: number;
  readonly undecodable: number;
}

/** The publisher's batches from this number on, in order. May throw KvError; may have holes. */
export type Replay = (fromSeq: number) => AsyncIterable<Replayed>;
/** All that the publisher holds, each part with the number of the batch from which on it is to be continued. None: it cannot tell. */
export type Snapshot = () => AsyncIterable<Replayed>;

export interface ContinuitySources {
  readonly replay: Replay | null;
  readonly snapshot?: Snapshot | null;
}

/** How often the rest of an answer with a hole in it is asked for again, as long as each answer brings something. */
const maxReplays = 8;
const notHeld = 'the publisher does not hold them for replay any more';
const notShown = 'the publisher does not hold the last batch any more';

/** How an answer ended: as the publisher ends it; before batches that it does not have; without the batch that shows that it is the same life. */
type Answer = { readonly end: 'whole' | 'restarted' | 'unproven' } | { readonly end: 'hole'; readonly nextSeq: number };

export class Continuity<Batch extends { readonly ts: number }> {
  readonly #decode: (payload: Uint8Array) => Batch;
  readonly #replay: Replay | null;
  readonly #snapshot: Snapshot | null;
  readonly #topic: string;
  readonly #counts = { batches: 0, replayed: 0, gaps: 0, restarts: 0, snapshots: 0, repeated: 0, undecodable: 0 };
  /** The next number of this life, and the batch before it, if we have that one. */
  #expected = 0;
  #last: Published | undefined;
  /** When the latest of what we have was said, by the publisher's clock. */
  #lastTs = Number.NEGATIVE_INFINITY;
  #suspect = false;
  /** Something is missing that a snapshot would bring. */
  #isPartial: boolean;
  #resyncs = 0;
  /** It was asked in this connection, and has none. */
  #tellsNone = false;

  /** Batches of other topics than those that begin with `topic` count, but are not handed out. `decode` may throw KvError. */
  constructor(decode: (payload: Uint8Array) => Batch, { replay, snapshot = null }: ContinuitySources, topic: string) {
    this.#decode = decode;
    this.#replay = replay;
    this.#snapshot = snapshot;
    // Who says nothing may hold much.
    this.#isPartial = snapshot !== null;
    this.#topic = topic;
  }

  get counts(): ContinuityCounts {
    return { ...this.#counts };
  }

  /** The connection was lost: the next batch may be one of another life. */
  suspect(): void {
    this.#suspect = this.#expected > 0;
    this.#tellsNone = false;
  }

  /** Something is missing that `probe` may bring now. */
  get wantsProbe(): boolean {
    return this.#isPartial && this.#snapshot !== null && !this.#tellsNone;
  }

  /** The next `probe` asks for a snapshot, whatever we have. */
  resync(): void {
    this.#resyncs++;
    this.#isPartial = true;
    this.#tellsNone = false;
  }

  /** What there is to say now that `live` arrived: first what came before it. Never throws for what a publisher sends. */
  async *arrived(live: Arrived<Batch>): AsyncGenerator<StreamItem<Batch>> {
    if (live.seq < this.#expected) {
      if (this.#isRepeat(live)) {
        this.#counts.repeated++;
        return;
      }
      yield this.#restarted();
    }
    if (live.seq > this.#expected || this.#suspect) yield* this.#fill(live.seq, live.topic);
    // A snapshot may have brought it already.
    if (live.seq >= this.#expected) yield* this.#take(live);
  }

  /** What we miss without knowing, as nothing arrives that would tell: the last batches, or all of an idle publisher. */
  async *probe(): AsyncGenerator<StreamItem<Batch>> {
    if (this.#isPartial) yield* this.#takeSnapshot();
    yield* this.#fill(Number.POSITIVE_INFINITY, this.#topic);
  }

  /**
   * Whether `live` continues what was before, as almost all do: `next` tells then all that there is to say. Only the payload of the last one
   * before another that does not continue is looked at again.
   */
  continues(live: Published): boolean {
    return live.seq === this.#expected && !this.#suspect;
  }

  /** What to say of a batch that `continues`; undefined: nothing. Never throws for what a publisher sends. */
  next(one: Arrived<Batch>): StreamItem<Batch> | undefined {
    this.#expected = one.seq + 1;
    this.#last = one;
    if (!one.topic.startsWith(this.#topic)) return undefined;
    let batch: Batch;
    try {
      batch = one.batch ?? this.#decode(one.payload);
    } catch (error) {
      this.#counts.undecodable++;
      this.#counts.gaps++;
      this.#isPartial = true;
      const reason = KvError.from(error).message;
      return { kind: 'gap', fromSeq: one.seq, untilSeq: one.seq + 1, reason, isUnread: true };
    }
    this.#counts.batches++;
    this.#lastTs = Math.max(this.#lastTs, batch.ts);
    return { kind: 'batch', seq: one.seq, topic: one.topic, batch };
  }

  /** All up to batch `until`, which is infinite where nothing tells what the last one is. */
  async *#fill(until: number, topic: string): AsyncGenerator<StreamItem<Batch>> {
    const isProbe = until === Number.POSITIVE_INFINITY;
    let reason = 'no replay endpoint is configured';
    for (let i = 0; this.#replay && i < maxReplays && (this.#expected < until || this.#suspect); i++) {
      const before = this.#expected;
      reason = notHeld;
      let answer: Answer = { end: 'whole' };
      try {
        answer = yield* this.#replayed(this.#replay, until, topic);
      } catch (error) {
        reason = KvError.from(error).message;
      }
      if (answer.end === 'hole' || answer.end === 'unproven') {
        if (yield* this.#takeSnapshot()) continue;
        yield answer.end === 'hole'
          ? this.#gap(Math.min(answer.nextSeq, until), notHeld)
          : this.#gap(this.#expected, notShown);
        continue;
      }
      if (answer.end === 'restarted') continue;
      if (isProbe || this.#expected === before) {
        // Who does not answer cannot show that nothing was missed.
        if (isProbe && reason !== notHeld && this.#expected > 0) yield this.#gap(this.#expected, reason);
        break; // this brought nothing
      }
    }
    if (isProbe) return;
    // The last ones before `until` are those that the publisher lost itself.
    if (this.#replay && (this.#expected < until || this.#suspect)) yield* this.#takeSnapshot();
    if (this.#expected < until || this.#suspect) yield this.#gap(until, reason);
  }

  /** One answer, up to a hole that asking again may fill, or up to `until`. */
  async *#replayed(replay: Replay, until: number, topic: string): AsyncGenerator<StreamItem<Batch>, Answer> {
    const anchor = this.#last;
    let isShown = anchor === undefined;
    if (isShown && this.#suspect) return { end: 'unproven' };
    let taken = 0;
    for await (const one of replay(anchor ? anchor.seq : this.#expected)) {
      if (anchor && !isShown) {
        if (one.seq === anchor.seq && !same(one, anchor)) {
          yield this.#restarted();
          return { end: 'restarted' };
        }
        if (one.seq <= anchor.seq) {
          if (one.seq === anchor.seq) {
            this.#suspect = false;
            isShown = true;
          }
          continue;
        }
        // Without the batch before it, nothing shows that this one is of the same life.
        if (this.#suspect) return { end: 'hole', nextSeq: one.seq };
        isShown = true;
      }
      if (one.seq >= until) return { end: 'whole' };
      if (one.seq < this.#expected) continue;
      if (one.seq > this.#expected) return taken > 0 ? { end: 'whole' } : { end: 'hole', nextSeq: one.seq };
      this.#counts.replayed++;
      taken++;
      yield* this.#take({ ...one, topic: one.topic ?? topic }); // without topics there is one only
    }
    // A publisher keeps its last batch: one that answers with nothing is another, or cannot show that it is not.
    return { end: isShown || until !== Number.POSITIVE_INFINITY ? 'whole' : 'unproven' };
  }

  /** Whether there was one; our state is that of the snapshot then. */
  async *#takeSnapshot(): AsyncGenerator<StreamItem<Batch>, boolean> {
    if (this.#snapshot === null || this.#tellsNone) return false;
    let isBegun = false;
    const resyncs = this.#resyncs;
    try {
      for await (const { seq, topic = this.#topic, payload } of this.#snapshot()) {
        if (!isBegun) {
          isBegun = true;
          this.#counts.snapshots++;
          this.#expected = seq;
          this.#last = undefined;
          this.#lastTs = Number.NEGATIVE_INFINITY;
          this.#suspect = false;
          this.#isPartial = true;
          yield { kind: 'snapshot', seq };
        }
        const batch = this.#decode(payload);
        this.#lastTs = Math.max(this.#lastTs, batch.ts);
        if (topic.startsWith(this.#topic)) yield { kind: 'batch', seq, topic, batch };
      }
      if (!isBegun) this.#tellsNone = true;
      else if (resyncs === this.#resyncs) this.#isPartial = false; // else another one was wanted meanwhile
    } catch {
      // What came of it is true, and what did not is asked for with the next probe.
    }
    return isBegun;
  }

  *#take(one: Arrived<Batch>): Generator<StreamItem<Batch>> {
    const item = this.next(one);
    if (item) yield item;
  }

  /** A batch before the one that we expect: of this life, or the first one of another? */
  #isRepeat(live: Arrived<Batch>): boolean {
    if (this.#suspect) return false;
    if (!live.topic.startsWith(this.#topic)) return true;
    try {
      return (live.batch ?? this.#decode(live.payload)).ts <= this.#lastTs;
    } catch {
      return true; // the next one will tell
    }
  }

  #gap(until: number, reason: string): StreamItem<Batch> {
    const gap = { kind: 'gap', fromSeq: this.#expected, untilSeq: until, reason } as const;
    this.#counts.gaps++;
    this.#expected = until;
    this.#last = undefined;
    this.#suspect = false;
    this.#isPartial = true;
    return gap;
  }

  #restarted(): StreamItem<Batch> {
    const restarted = { kind: 'restarted', lastSeq: this.#expected - 1 } as const;
    this.#counts.restarts++;
    this.#expected = 0;
    this.#last = undefined;
    this.#lastTs = Number.NEGATIVE_INFINITY;
    this.#suspect = false;
    this.#isPartial = false;
    this.#tellsNone = false;
    return restarted;
  }
}

const same = (a: Replayed, b: Replayed): boolean => Buffer.compare(a.payload, b.payload) === 0;
