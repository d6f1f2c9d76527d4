/**
 * Makes one in-order stream of what arrives from a publisher and of what it replays, with a notice wherever the stream does
 * not continue what was before.
 *
 *   seq 0 1 2 . . 5 6        3 and 4 are asked for again; what the publisher no longer has becomes a 'gap'
 *   seq 7 8 9 0 1            the publisher started again: 'restarted', its state before is void
 *
 * Invariant: whoever applies the batches, and forgets all it knew of this publisher at each notice, never knows more than
 * what the publisher said in its present life, and knows all of that which it can still replay.
 *
 * A publisher may restart while we are not connected, and then the number that we expect may come again. So a replay
 * begins with the last batch that we have, which must be the same byte for byte; `suspect` asks for that before the next
 * batch. Knows nothing of sockets, so that tests can lose and restart at will.
 */
import { KvError } from '@kvtier/errors';
import type { KvEventBatch } from './event.ts';
import type { Published, Replayed } from './replay-buffer.ts';

/** `Batch`: the form in which batches are wanted. */
export type StreamItem<Batch = KvEventBatch> =
  | { readonly kind: 'batch'; readonly seq: number; readonly topic: string; readonly batch: Batch }
  /** Batches fromSeq ... untilSeq - 1 are lost. None: only that nothing was missed could not be shown. */
  | { readonly kind: 'gap'; readonly fromSeq: number; readonly untilSeq: number; readonly reason: string }
  /** A new life of the publisher: it holds nothing of what it said up to lastSeq. */
  | { readonly kind: 'restarted'; readonly lastSeq: number };

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
  readonly undecodable: number;
}

/** The publisher's batches from this number on, in order. May throw KvError; may have holes. */
export type Replay = (fromSeq: number) => AsyncIterable<Replayed>;

/** How often the rest of an answer with a hole in it is asked for again, as long as each answer brings something. */
const maxReplays = 8;

export class Continuity<Batch> {
  readonly #decode: (payload: Uint8Array) => Batch;
  readonly #replay: Replay | null;
  readonly #topic: string;
  readonly #counts = { batches: 0, replayed: 0, gaps: 0, restarts: 0, undecodable: 0 };
  /** The next number of this life, and the batch before it, if we have that one. */
  #expected = 0;
  #last: Published | undefined;
  #suspect = false;

  /** Batches of other topics than those that begin with `topic` count, but are not handed out. `decode` may throw KvError. */
  constructor(decode: (payload: Uint8Array) => Batch, replay: Replay | null, topic: string) {
    this.#decode = decode;
    this.#replay = replay;
    this.#topic = topic;
  }

  get counts(): ContinuityCounts {
    return { ...this.#counts };
  }

  /** The connection was lost: the next batch may be one of another life. */
  suspect(): void {
    this.#suspect = this.#last !== undefined;
  }

  /** What there is to say now that `live` arrived: first what came before it. Never throws for what a publisher sends. */
  async *arrived(live: Arrived<Batch>): AsyncGenerator<StreamItem<Batch>> {
    if (live.seq < this.#expected) yield this.#restarted();
    if (live.seq > this.#expected || this.#suspect) yield* this.#fill(live);
    yield* this.#take(live);
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
      return { kind: 'gap', fromSeq: one.seq, untilSeq: one.seq + 1, reason: KvError.from(error).message };
    }
    this.#counts.batches++;
    return { kind: 'batch', seq: one.seq, topic: one.topic, batch };
  }

  async *#fill(live: Published): AsyncGenerator<StreamItem<Batch>> {
    const until = live.seq;
    let reason = 'no replay endpoint is configured';
    for (let i = 0; this.#replay && i < maxReplays && (this.#expected < until || this.#suspect); i++) {
      const before = this.#expected;
      reason = 'the publisher does not hold them for replay any more';
      try {
        yield* this.#replayed(this.#replay, live);
      } catch (error) {
        reason = KvError.from(error).message;
      }
      if (this.#expected === before) break; // this brought nothing
    }
    if (this.#expected < until || this.#suspect) yield this.#gap(until, reason);
  }

  /** One answer, up to a hole that asking again may fill, or up to `until`. */
  async *#replayed(replay: Replay, { seq: until, topic }: Published): AsyncGenerator<StreamItem<Batch>> {
    let anchor = this.#last;
    let taken = 0;
    for await (const one of replay(anchor ? anchor.seq : this.#expected)) {
      if (anchor) {
        if (one.seq === anchor.seq && !same(one, anchor)) {
          yield this.#restarted();
          return;
        }
        if (one.seq <= anchor.seq) {
          if (one.seq === anchor.seq) this.#suspect = false;
          continue;
        }
        // Without the batch before it, nothing shows that this one is of the same life.
        if (this.#suspect)
          yield this.#gap(Math.min(one.seq, until), 'the publisher does not hold the last batch any more');
        anchor = undefined;
      }
      if (one.seq >= until) return;
      if (one.seq < this.#expected) continue;
      if (one.seq > this.#expected) {
        if (taken > 0) return;
        yield this.#gap(one.seq, 'the publisher does not hold them for replay any more');
      }
      this.#counts.replayed++;
      taken++;
      yield* this.#take({ ...one, topic: one.topic ?? topic }); // without topics there is one only
    }
  }

  *#take(one: Arrived<Batch>): Generator<StreamItem<Batch>> {
    const item = this.next(one);
    if (item) yield item;
  }

  #gap(until: number, reason: string): StreamItem<Batch> {
    const gap = { kind: 'gap', fromSeq: this.#expected, untilSeq: until, reason } as const;
    this.#counts.gaps++;
    this.#expected = until;
    this.#last = undefined;
    this.#suspect = false;
    return gap;
  }

  #restarted(): StreamItem<Batch> {
    const restarted = { kind: 'restarted', lastSeq: this.#expected - 1 } as const;
    this.#counts.restarts++;
    this.#expected = 0;
    this.#last = undefined;
    this.#suspect = false;
    return restarted;
  }
}

const same = (a: Replayed, b: Replayed): boolean => Buffer.compare(a.payload, b.payload) === 0;
