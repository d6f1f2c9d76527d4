/** A publisher without sockets, and the link to it: batches are lost, come twice, late or not at all; answers break off. */
import { encodeBatch, type KvEvent, type PackedBatch, PackedDecoder, type StreamItem } from '@kvtier/events';
import { Continuity, Probing, type Published, ReplayBuffer } from '@kvtier/events/testing';
import type { Listing } from '../feed/followed-stream.ts';

/** 32 random bits a call (mulberry32), as a number from 0 to 1. */
export function randomOf(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t ^= t + Math.imul(t ^ (t >>> 7), 61 | t);
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

export interface SimClock {
  readonly nowMs: number;
  /** Nothing fails now. */
  readonly isCalm: boolean;
}

export interface SimPublisherOptions {
  readonly clock: SimClock;
  readonly random: () => number;
  /** Batches that can be replayed. */
  readonly bufferSteps: number;
  /** undefined: it tells none. */
  readonly held: (() => Iterable<{ readonly events: readonly KvEvent[]; readonly topic: string }>) | undefined;
  /** What else may happen while an answer is on its way. */
  readonly meanwhile: () => void;
}

export const simCounts = () => ({ batches: 0, lost: 0, repeated: 0, late: 0, restarts: 0, cuts: 0 });
export type SimCounts = ReturnType<typeof simCounts>;

const chance = { lost: 0.02, repeated: 0.02, late: 0.02, brokenAnswer: 0.03, silentAnswer: 0.03 };
const mostLateMs = 1_500;

export class SimPublisher {
  readonly #options: SimPublisherOptions;
  #buffer: ReplayBuffer;
  #nextSeq = 0;
  #lastTs = 0;
  /** Set while no connection stands. */
  upAtMs = 0;
  /** What is on its way, by the millisecond in which it arrives. */
  readonly arrivals: { readonly atMs: number; readonly one: Published }[] = [];

  constructor(options: SimPublisherOptions) {
    this.#options = options;
    this.#buffer = new ReplayBuffer(options.bufferSteps, 1 << 24);
  }

  publish(events: readonly KvEvent[], topic: string, counts: SimCounts): void {
    const { clock, random } = this.#options;
    const one = { seq: this.#nextSeq++, topic, payload: this.#encode(events) };
    this.#buffer.push(one);
    counts.batches++;
    if (clock.nowMs < this.upAtMs || random() < chance.lost) {
      counts.lost++;
      return;
    }
    const isLate = random() < chance.late;
    if (isLate) counts.late++;
    this.arrivals.push({ atMs: clock.nowMs + 1 + Math.floor(random() * (isLate ? mostLateMs : 20)), one });
    if (random() >= chance.repeated) return;
    counts.repeated++;
    this.arrivals.push({ atMs: clock.nowMs + 1 + Math.floor(random() * mostLateMs), one });
  }

  /** A new life: its connections end, and what was on its way with them. */
  restart(): void {
    this.#buffer = new ReplayBuffer(this.#options.bufferSteps, 1 << 24);
    this.#nextSeq = 0;
    this.arrivals.length = 0;
  }

  readonly replay = async function* (this: SimPublisher, from: number): AsyncGenerator<Published> {
    if (this.#isSilent()) throw new Error('no end of the replay in time');
    for (let one = this.#buffer.firstFrom(from); one; one = this.#buffer.firstFrom(one.seq + 1)) {
      yield one;
      this.#mayBreak();
    }
  }.bind(this);

  /** Somebody who asks beside the stream hears something. */
  answers(): boolean {
    return !this.#isSilent();
  }

  readonly snapshot = async function* (this: SimPublisher): AsyncGenerator<Published> {
    const { held } = this.#options;
    if (this.#isSilent()) throw new Error('no end of the replay in time');
    if (held === undefined) return;
    const pages = held();
    const seq = this.#nextSeq;
    yield { seq, topic: 'kv', payload: this.#encode([]) };
    for (const { events, topic } of pages) {
      this.#mayBreak();
      yield { seq, topic, payload: this.#encode(events) };
    }
  }.bind(this);

  #isSilent(): boolean {
    const { clock, random } = this.#options;
    return clock.nowMs < this.upAtMs || (!clock.isCalm && random() < chance.silentAnswer);
  }

  #mayBreak(): void {
    const { clock, random, meanwhile } = this.#options;
    if (!clock.isCalm && random() < chance.brokenAnswer) throw new Error('the answer broke off');
    if (random() < 0.2) meanwhile();
  }

  /** Its clock goes on with every batch. */
  #encode(events: readonly KvEvent[]): Buffer {
    this.#lastTs = Math.max(this.#options.clock.nowMs / 1_000, this.#lastTs + 1e-6);
    return encodeBatch({ ts: this.#lastTs, events, dataParallelRank: null });
  }
}

/** The router's end: what `KvEventSubscriber` and `FollowedStream` do, on a clock that is turned by hand. */
export class SimFollower {
  readonly #clock: SimClock;
  readonly #publisher: SimPublisher;
  readonly #listing: Listing;
  readonly #continuity: Continuity<PackedBatch>;
  readonly #probing: Probing;
  /** Of snapshots that were not told. */
  readonly #snapshotProbing: Probing;
  #isDown = false;
  readonly #isDeaf: boolean;

  /** `isDeaf`: a planted fault, as if nothing were said where the stream does not continue. `tokens`: it asks for them. */
  constructor(clock: SimClock, publisher: SimPublisher, listing: Listing, isDeaf = false, tokens = false) {
    this.#isDeaf = isDeaf;
    const decoder = new PackedDecoder({ tokens });
    this.#clock = clock;
    this.#publisher = publisher;
    this.#listing = listing;
    this.#continuity = new Continuity((payload) => decoder.decode(payload), publisher, '');
    this.#probing = new Probing(clock.nowMs);
    this.#snapshotProbing = new Probing(clock.nowMs);
  }

  get counts() {
    return this.#continuity.counts;
  }

  resync(): void {
    this.#continuity.resync();
  }

  /** What has arrived by now, and what is due. */
  async step(): Promise<void> {
    const { nowMs } = this.#clock;
    if (nowMs < this.#publisher.upAtMs) {
      if (!this.#isDown) this.#continuity.suspect();
      this.#isDown = true;
      return;
    }
    if (this.#isDown) {
      this.#isDown = false;
      this.#probing.connected();
      this.#snapshotProbing.connected();
      await this.#probe();
    }
    const { arrivals } = this.#publisher;
    const due = arrivals.filter(({ atMs }) => atMs <= nowMs).sort((a, b) => a.atMs - b.atMs);
    if (due.length > 0) arrivals.splice(0, arrivals.length, ...arrivals.filter(({ atMs }) => atMs > nowMs));
    for (const { one } of due) {
      this.#probing.heard(nowMs);
      for await (const item of this.#continuity.arrived(one)) this.#apply(item);
    }
    const { wantsProbe, awaitsSnapshot, counts } = this.#continuity;
    if (this.#probing.isDue(nowMs, wantsProbe || counts.unanswered > 0)) await this.#probe();
    if (!awaitsSnapshot || counts.unanswered > 0 || !this.#snapshotProbing.isDue(nowMs, true)) return;
    this.#snapshotProbing.unanswered(nowMs);
    if (!this.#publisher.answers()) return;
    this.#continuity.tells();
    await this.#probe();
  }

  #apply(item: StreamItem<PackedBatch>): void {
    if (item.kind === 'batch' || !this.#isDeaf) for (const _ of this.#listing.apply(item));
  }

  async #probe(): Promise<void> {
    const before = this.#continuity.counts;
    // Who did not answer is asked beside the stream first.
    if (before.unanswered > 0 && !this.#publisher.answers()) {
      for (const item of this.#continuity.unanswered()) this.#apply(item);
      this.#probing.unanswered(this.#clock.nowMs);
      return;
    }
    for await (const item of this.#continuity.probe()) this.#apply(item);
    const after = this.#continuity.counts;
    const isNew = after.replayed + after.snapshots > before.replayed + before.snapshots;
    if (after.snapshots > before.snapshots) this.#snapshotProbing.probed(this.#clock.nowMs, true);
    if (after.unanswered > 0) this.#probing.unanswered(this.#clock.nowMs);
    else this.#probing.probed(this.#clock.nowMs, isNew);
  }
}
