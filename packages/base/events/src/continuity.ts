/**
 * Makes one in-order stream of what arrives from a publisher and of what it replays, with a notice wherever the stream does
 * not continue what was before.
 *
 *   seq 0 1 2 . . 5 6        3 and 4 are asked for again; where the publisher no longer has them it is asked for all that it
 *                            holds ('snapshot'), and who cannot tell that leaves a 'gap'
 *   seq 7 8 9 0 1            the publisher started again: 'restarted', its state before is void
 *   seq 7 8 9 8              said before (not later than what we have, by the publisher's own clock): nothing
 *
 * Where nobody answered, what became void may be there still: all of it is asked for again, from the first batch on.
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
  /** Asked in vain so often in a row: nothing came of it, not even that there is nothing. */
  readonly unanswered: number;
}

/** The publisher's batches from this number on, in order. May throw KvError; may have holes. */
export type Replay = (fromSeq: number) => AsyncIterable<Replayed>;
/** All that the publisher holds, each part with the number of the batch from which on it is to be continued. None: it cannot tell. */
export type Snapshot = () => AsyncIterable<Replayed>;

export interface ContinuitySources {
  readonly replay: Replay | null;
  readonly snapshot?: Snapshot | null;
}

/** An answer that broke off is asked on as long as it brings so many batches. */
const manyBatches = 64;
/** And so often where it brings fewer, or another life, or a hole. */
const maxSlight = 8;
/** More parts in a row that bring nothing than a publisher keeps: such an answer has no end. */
const maxIdleParts = 16_384;
/** So many probes in a row of which nothing came make void what was said before: the last batch may be one that was lost. */
const maxDoubts = 2;
const notHeld = 'the publisher does not hold them for replay any more';
const notShown = 'the publisher does not hold the last batch any more';
const notAnswered = 'the publisher does not answer';

/**
 * How an answer ended: as the publisher ends it; in its middle, as later parts were lost on their way or none came any more; before batches that
 * it does not have; without the batch that shows that it is the same life.
 */
type Answer =
  | { readonly end: 'whole' | 'broken' | 'restarted' | 'unproven' }
  | { readonly end: 'hole'; readonly nextSeq: number };

export class Continuity<Batch extends { readonly ts: number }> {
  readonly #decode: (payload: Uint8Array) => Batch;
  readonly #replay: Replay | null;
  readonly #snapshot: Snapshot | null;
  readonly #topic: string;
  readonly #counts = {
    ...{ batches: 0, replayed: 0, gaps: 0, restarts: 0, snapshots: 0, repeated: 0, undecodable: 0, unanswered: 0 },
  };
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
  /** Nothing was handed out since all was void last. */
  #isBlank = true;
  /** Of the batches before this one, which are void, the publisher may hold some: nobody was there to ask. */
  #voidBefore: number | undefined;
  /** Something came of what was asked last. */
  #isAnswered = false;
  /** Nobody answers now: what is under way asks no more, so that what arrives waits for one silence at most. */
  #isSilent = false;
  /** A snapshot was asked for last in vain. */
  #isSnapshotSilent = false;
  /** Probes in a row of which nothing came, while nothing else showed that nothing was missed. */
  #doubts = 0;

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
    const isVoid = this.#voidBefore !== undefined && this.#replay !== null;
    return isVoid || (this.#wantsSnapshot && !this.#isSnapshotSilent);
  }

  /** A snapshot is missing, and was asked for in vain. Others than us are to ask whether it is told now: a probe does not, until `tells`. */
  get awaitsSnapshot(): boolean {
    return this.#wantsSnapshot && this.#isSnapshotSilent;
  }

  get #wantsSnapshot(): boolean {
    return this.#isPartial && this.#snapshot !== null && !this.#tellsNone;
  }

  /** The next `probe` asks for a snapshot, whatever we have, unless the one before was asked for in vain. */
  resync(): void {
    this.#resyncs++;
    this.#isPartial = true;
    this.#tellsNone = false;
  }

  /** What there is to say now that `live` arrived: first what came before it. Never throws for what a publisher sends. */
  async *arrived(live: Arrived<Batch>): AsyncGenerator<StreamItem<Batch>> {
    // What arrived does not wait for one who answers nobody: what he holds is told once he answers a probe again.
    this.#isSilent = this.#counts.unanswered > 0;
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
    this.#isSilent = false;
    if (this.#isPartial) yield* this.#takeSnapshot();
    if (this.#isSilent) yield* this.#doubted(notAnswered);
    else yield* this.#fill(Number.POSITIVE_INFINITY, this.#topic);
  }

  /** The publisher was asked for a snapshot by others than us, and answered. */
  tells(): void {
    this.#isSnapshotSilent = false;
  }

  /** It was asked by others, in place of a probe, and did not answer. */
  *unanswered(): Generator<StreamItem<Batch>> {
    this.#silence();
    yield* this.#doubted(notAnswered);
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
    this.#doubts = 0;
    if (!one.topic.startsWith(this.#topic)) return undefined;
    let batch: Batch;
    try {
      batch = one.batch ?? this.#decode(one.payload);
    } catch (error) {
      this.#counts.undecodable++;
      this.#counts.gaps++;
      this.#isPartial = true;
      this.#isBlank = true;
      const reason = KvError.from(error).message;
      return { kind: 'gap', fromSeq: one.seq, untilSeq: one.seq + 1, reason, isUnread: true };
    }
    this.#counts.batches++;
    this.#isBlank = false;
    this.#lastTs = Math.max(this.#lastTs, batch.ts);
    return { kind: 'batch', seq: one.seq, topic: one.topic, batch };
  }

  /** All up to batch `until`, which is infinite where nothing tells what the last one is. */
  async *#fill(until: number, topic: string): AsyncGenerator<StreamItem<Batch>> {
    const isProbe = until === Number.POSITIVE_INFINITY;
    const replay = this.#replay;
    let reason = replay ? notAnswered : 'no replay endpoint is configured';
    for (let slight = 0; replay && slight < maxSlight && (this.#expected < until || this.#suspect); ) {
      if (this.#isSilent) {
        reason = notAnswered; // whatever an answer before said: the rest was not asked for
        break;
      }
      const before = this.#counts.replayed;
      reason = notHeld;
      let answer: Answer = { end: 'broken' };
      this.#isAnswered = false;
      try {
        answer = yield* this.#replayed(replay, until, topic);
      } catch (error) {
        reason = KvError.from(error).message;
        if (!this.#isAnswered) this.#silence();
      }
      const brought = this.#counts.replayed - before;
      if (brought < manyBatches) slight++;
      if (answer.end === 'hole' || answer.end === 'unproven') {
        if (yield* this.#takeSnapshot()) continue;
        yield answer.end === 'hole'
          ? this.#gap(Math.min(answer.nextSeq, until), notHeld)
          : this.#gap(this.#expected, this.#isSilent ? notAnswered : notShown);
        continue;
      }
      if (answer.end === 'restarted') continue;
      if (isProbe && answer.end === 'whole') return;
      if (brought > 0) continue;
      if (isProbe) yield* this.#doubted(reason);
      break;
    }
    if (isProbe) return;
    // The last ones before `until` are those that the publisher lost itself.
    if (this.#replay && (this.#expected < until || this.#suspect)) yield* this.#takeSnapshot();
    if (this.#expected < until || this.#suspect) yield this.#gap(until, reason);
  }

  /** One answer, up to a hole that asking again may fill, or up to `until`. */
  async *#replayed(replay: Replay, until: number, topic: string): AsyncGenerator<StreamItem<Batch>, Answer> {
    let anchor = this.#last;
    let isShown = anchor === undefined;
    const isAnew = this.#voidBefore !== undefined;
    if (isShown && this.#suspect && !isAnew) return { end: 'unproven' };
    let taken = 0;
    let idle = 0;
    for await (const one of replay(isAnew ? 0 : (anchor?.seq ?? this.#expected))) {
      this.#answered();
      if (idle++ >= maxIdleParts)
        throw new KvError(
          'PROTOCOL',
          `a replay: ${maxIdleParts} batches in a row that nobody asked for; is this the replay endpoint?`,
        );
      if (this.#voidBefore !== undefined) {
        if (one.seq < this.#voidBefore) {
          yield* this.#begunAnew(one.seq);
          anchor = undefined;
          isShown = true;
        }
        this.#voidBefore = undefined;
      }
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
      if (one.seq > this.#expected) return taken > 0 ? { end: 'broken' } : { end: 'hole', nextSeq: one.seq };
      this.#counts.replayed++;
      taken++;
      idle = 0;
      yield* this.#take({ ...one, topic: one.topic ?? topic }); // without topics there is one only
    }
    this.#answered();
    this.#voidBefore = undefined;
    // A publisher keeps its last batch: one that answers with nothing is another, or cannot show that it is not.
    if (!isShown && until === Number.POSITIVE_INFINITY) return { end: 'unproven' };
    this.#doubts = 0;
    return { end: 'whole' };
  }

  /** Whether there was one; our state is that of the snapshot then. */
  async *#takeSnapshot(): AsyncGenerator<StreamItem<Batch>, boolean> {
    // A snapshot that nobody tells would be waited for each time.
    if (this.#snapshot === null || this.#tellsNone || this.#isSilent || this.#isSnapshotSilent) return false;
    let isBegun = false;
    const resyncs = this.#resyncs;
    try {
      for await (const { seq, topic = this.#topic, payload } of this.#snapshot()) {
        if (!isBegun) {
          isBegun = true;
          this.#answered();
          this.#doubts = 0;
          this.#counts.snapshots++;
          this.#expected = seq;
          this.#last = undefined;
          this.#lastTs = Number.NEGATIVE_INFINITY;
          this.#suspect = false;
          this.#isPartial = true;
          this.#voidBefore = undefined;
          this.#isBlank = false;
          yield { kind: 'snapshot', seq };
        }
        const batch = this.#decode(payload);
        this.#lastTs = Math.max(this.#lastTs, batch.ts);
        if (topic.startsWith(this.#topic)) yield { kind: 'batch', seq, topic, batch };
      }
      this.#answered();
      if (!isBegun) this.#tellsNone = true;
      else if (resyncs === this.#resyncs) this.#isPartial = false; // else another one was wanted meanwhile
    } catch {
      // What came of it is true, and what did not is asked for with the next probe.
      if (!isBegun) {
        this.#silence();
        this.#isSnapshotSilent = true;
      }
    }
    return isBegun;
  }

  #answered(): void {
    this.#isAnswered = true;
    this.#counts.unanswered = 0;
  }

  #silence(): void {
    this.#isSilent = true;
    this.#counts.unanswered++;
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

  /** Nothing came of a probe, so nothing shows that nothing was missed. One time may be chance. */
  *#doubted(reason: string): Generator<StreamItem<Batch>> {
    if (++this.#doubts >= maxDoubts && !this.#isBlank) yield this.#gap(this.#expected, reason);
  }

  /** The publisher tells from here on what was void. What came since then comes once more. */
  *#begunAnew(seq: number): Generator<StreamItem<Batch>> {
    if (!this.#isBlank) yield this.#gap(this.#expected, 'the publisher tells all that it holds once more');
    this.#expected = seq;
    this.#last = undefined;
    this.#lastTs = Number.NEGATIVE_INFINITY;
    this.#suspect = false;
  }

  #gap(until: number, reason: string): StreamItem<Batch> {
    const gap = { kind: 'gap', fromSeq: this.#expected, untilSeq: until, reason } as const;
    this.#counts.gaps++;
    this.#expected = until;
    this.#last = undefined;
    this.#suspect = false;
    this.#isPartial = true;
    this.#isBlank = true;
    // An answer that began told what it can: to begin it anew would lead to the same place.
    const isTold = reason === notHeld || (reason !== notShown && !this.#isSilent);
    this.#voidBefore = isTold || this.#replay === null ? undefined : until;
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
    this.#isBlank = true;
    this.#voidBefore = undefined;
    return restarted;
  }
}

const same = (a: Replayed, b: Replayed): boolean => Buffer.compare(a.payload, b.payload) === 0;
