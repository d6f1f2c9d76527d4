/**
 * Publishes KV events over a ZeroMQ PUB socket, and replays the latest ones to who asks, both as vLLM's publisher does
 * (`ZmqEventPublisher`): any of its consumers reads ours.
 *
 * Invariants: `publish` never waits and never throws; a batch that cannot be encoded or sent leaves a hole in the sequence,
 * which every consumer sees, instead of a lie. Sequence numbers begin at 0 with every life and count batches. Queue and
 * replay buffer are bounded; what a slow subscriber does not take is dropped for that subscriber alone, by ZeroMQ, and
 * can be had again from the replay buffer.
 */
import { curvePublicKey } from '@kvtier/config/curve';
import { Context, Publisher } from 'zeromq';
import { BoundSockets, bind } from './bound-sockets.ts';
import { type Encoding, encodeBatch } from './codec.ts';
import type { KvEvent } from './event.ts';
import { Outbox } from './outbox.ts';
import { PackedEncoder, type PackedEvents } from './packed-encoder.ts';
import { PackedPace } from './packed-pace.ts';
import { type Published, ReplayBuffer } from './replay-buffer.ts';
import { mostFrameBytes, ReplayServer } from './replay-server.ts';
import { Authenticator, bindableEndpoint, type CurveServer, checkCurveServer, endpointOfRank } from './security.ts';
import { socketFiles } from './socket-files.ts';

/** The names are those of vLLM's KVEventsConfig. */
export interface KvEventPublisherOptions extends Encoding {
  /** "ipc:///PATH" or "tcp://127.0.0.1:PORT"; beyond loopback only with `curve` or `trustedNetwork`. Port * takes a free one. */
  readonly endpoint: string;
  /** Where missed batches can be asked for; null: nowhere. */
  readonly replayEndpoint?: string | null;
  readonly topic?: string;
  /** Batches that can be replayed. */
  readonly bufferSteps?: number;
  /** Bytes that the batches kept for replay may take. */
  readonly bufferBytes?: number;
  /** Batches that ZeroMQ holds for one slow subscriber before it drops. */
  readonly hwm?: number;
  /** Batches that wait for the socket before the oldest are dropped. */
  readonly maxQueueSize?: number;
  /** Least milliseconds between two batches of packed events (5): those of the time between go together; 0: each is a batch. */
  readonly gatherMs?: number;
  /** With data parallelism: in every batch, and added to the ports. */
  readonly dataParallelRank?: number;
  readonly curve?: CurveServer | null;
  /** Beyond loopback without `curve`, too: whoever reaches it reads. */
  readonly trustedNetwork?: boolean;
  /** Unix time in seconds. */
  readonly now?: () => number;
  readonly logger?: { warn(details: object, message: string): void };
}

/** Some of what is held, told as events; of one subtopic. Small: each is made in one turn. */
export type SnapshotPage = readonly KvEvent[] | { readonly events: readonly KvEvent[]; readonly subtopic: string };

export interface KvEventPublisherStats {
  readonly publishedBatches: number;
  readonly publishedEvents: number;
  readonly publishedBytes: number;
  /** Dropped before the socket took them; they can still be replayed. */
  readonly droppedBatches: number;
  /** Holes in the sequence: events that nobody can have. */
  readonly lostBatches: number;
  readonly queuedBatches: number;
  readonly bufferedBatches: number;
  readonly bufferedBytes: number;
  readonly replays: number;
  readonly refusedClients: number;
}

const defaults = { bufferSteps: 10_000, bufferBytes: 64 * 2 ** 20, hwm: 10_000, maxQueueSize: 10_000, gatherMs: 5 };

export class KvEventPublisher {
  /** Where the sockets are bound, ports resolved. */
  readonly endpoint: string;
  readonly replayEndpoint: string | null;
  readonly topic: string;
  /** What packed events must tell of a hash: its last bytes, which are its integer on the wire, or all. */
  readonly packedHashBytes: 8 | 32;
  readonly #options: KvEventPublisherOptions;
  readonly #encoder: PackedEncoder;
  readonly #socket: Publisher;
  readonly #replay: ReplayServer | null;
  readonly #buffer: ReplayBuffer;
  readonly #authenticator: Authenticator | null;
  #removeFiles: () => void;
  readonly #bound: BoundSockets | null;
  #onServerKey: () => void = () => {};
  readonly #outbox: Outbox;
  readonly #counts = { publishedBatches: 0, publishedEvents: 0, publishedBytes: 0, lostBatches: 0 };
  #nextSeq = 0;
  #snapshot: (() => Iterable<SnapshotPage>) | undefined;
  readonly #pace: PackedPace;
  #closed = false;

  private constructor(
    options: KvEventPublisherOptions,
    socket: Publisher,
    buffer: ReplayBuffer,
    replay: ReplayServer | null,
    authenticator: Authenticator | null,
  ) {
    this.endpoint = socket.lastEndpoint!;
    this.replayEndpoint = replay?.endpoint ?? null;
    this.topic = options.topic ?? '';
    this.packedHashBytes = (options.intBlockHashes ?? true) ? 8 : 32;
    this.#options = options;
    this.#encoder = new PackedEncoder(options, options.bufferBytes ?? defaults.bufferBytes);
    this.#socket = socket;
    this.#buffer = buffer;
    this.#replay = replay;
    this.#authenticator = authenticator;
    this.#removeFiles = socketFiles([this.endpoint, this.replayEndpoint]);
    this.#bound = this.#renewing(options.curve ?? null);
    this.#outbox = new Outbox(socket, options.maxQueueSize ?? defaults.maxQueueSize);
    this.#pace = new PackedPace(options.gatherMs ?? defaults.gatherMs, (packed) => this.#publishNow(packed));
  }

  /** Throws KvError: CONFIG (an endpoint or key that cannot be, or is open to others and may not be), LOCKED (address in use), IO. */
  static async start(options: KvEventPublisherOptions): Promise<KvEventPublisher> {
    const { curve = null, replayEndpoint = null, dataParallelRank: rank = 0 } = options;
    const openness = { hasCurve: curve !== null, trustedNetwork: options.trustedNetwork ?? false };
    const endpointFor = (endpoint: string, option: string): string =>
      endpointOfRank(bindableEndpoint(endpoint, option, openness), rank);
    const endpoint = endpointFor(options.endpoint, 'endpoint');
    const replayAt = replayEndpoint === null ? null : endpointFor(replayEndpoint, 'replayEndpoint');
    if (curve) checkCurveServer(curve);

    const context = new Context({ blocky: false }); // of our own: one authenticator per context
    const authenticator = curve ? await Authenticator.start(context, curve) : null;
    const bufferSteps = options.bufferSteps ?? defaults.bufferSteps;
    const buffer = new ReplayBuffer(bufferSteps, options.bufferBytes ?? defaults.bufferBytes);
    // A PUB socket drops and never waits; that it need not wait makes each `send` one call and no turn of the event loop.
    const socket = new Publisher({
      context,
      linger: 0,
      sendHighWaterMark: options.hwm ?? defaults.hwm,
      sendTimeout: 0,
      maxMessageSize: mostFrameBytes,
    });
    let replay: ReplayServer | null = null;
    let self: KvEventPublisher | undefined;
    try {
      await bind(socket, endpoint, curve);
      if (replayAt !== null) {
        replay = new ReplayServer(context, buffer, () => (self ? self.#snapshotPages() : []), bufferSteps);
        await bind(replay.socket, replayAt, curve);
      }
    } catch (error) {
      socket.close();
      await replay?.close();
      await authenticator?.close();
      throw error;
    }
    const publisher = new KvEventPublisher(options, socket, buffer, replay, authenticator);
    self = publisher;
    replay?.start(async () => publisher.#bound?.settled());
    return publisher;
  }

  /** Its public key; null: it has none. */
  get serverKey(): string | null {
    const { curve } = this.#options;
    return curve ? curvePublicKey(curve.secretKey) : null;
  }

  /** Told when it is another one, and subscribers need it. */
  onServerKey(listener: () => void): void {
    this.#onServerKey = listener;
  }

  #renewing(curve: CurveServer | null): BoundSockets | null {
    if (curve === null) return null;
    const replay = this.#replay === null ? [] : [{ socket: this.#replay.socket, endpoint: this.#replay.endpoint }];
    const sockets = [...replay, { socket: this.#socket, endpoint: this.endpoint }];
    const bound = new BoundSockets(sockets, curve, (err) =>
      this.#options.logger?.warn({ err }, 'kv events: not published while its place is taken'),
    );
    curve.onRenewed?.(() => {
      if (this.#closed) return;
      void bound.renew().then(() => {
        this.#removeFiles = socketFiles([this.endpoint, this.replayEndpoint]);
      });
      this.#onServerKey();
    });
    return bound;
  }

  /**
   * What to answer who asks for all that is held. `pages` is called for each who asks, after which all that was held when it returned must
   * have been published. Its pages tell what was held then; or, where nobody holds a block twice, what is held when each is made: what
   * changes between them is told once more, which does no harm.
   */
  tellSnapshots(pages: () => Iterable<SnapshotPage>): void {
    this.#snapshot = pages;
  }

  *#snapshotPages(): Generator<Published> {
    if (this.#snapshot === undefined) return;
    const { topic = '', dataParallelRank = null, now = unixSeconds } = this.#options;
    const pages = this.#snapshot();
    this.#pace.flush();
    const seq = this.#nextSeq;
    const batchOf = (events: readonly KvEvent[], subtopic = ''): Published => ({
      ...{ seq, topic: topic + subtopic },
      payload: encodeBatch({ ts: now(), events, dataParallelRank }, this.#options),
    });
    // Also who holds nothing says so.
    yield batchOf([]);
    for (const page of pages) yield 'events' in page ? batchOf(page.events, page.subtopic) : batchOf(page);
  }

  /**
   * One batch, after the one before it. `subtopic` is appended to the topic (tiers: the namespace). The events must not
   * change afterwards. Nothing happens for no events, nor after close.
   */
  publish(events: readonly KvEvent[], subtopic = ''): void {
    if (this.#closed || events.length === 0) return;
    this.#pace.flush();
    const { topic = '', dataParallelRank = null, now = unixSeconds } = this.#options;
    this.#publish(topic + subtopic, events.length, () =>
      encodeBatch({ ts: now(), events, dataParallelRank }, this.#options),
    );
  }

  /**
   * What a block pool has noted, encoded without an object for each event: a batch, or with what follows within `gatherMs` a part of one.
   * `packed` is not used afterwards.
   */
  publishPacked(packed: PackedEvents): void {
    if (!this.#closed && packed.count > 0) this.#pace.add(packed);
  }

  #publishNow(packed: PackedEvents): void {
    const { topic = '', dataParallelRank = null, now = unixSeconds } = this.#options;
    this.#publish(topic, packed.count, () => this.#encoder.encode(packed, now(), dataParallelRank));
  }

  #publish(topic: string, events: number, encode: () => Buffer): void {
    let payload: Buffer;
    try {
      payload = encode();
    } catch (error) {
      this.#options.logger?.warn({ err: error }, 'kv events: a batch could not be encoded; consumers see a gap');
      this.#skip();
      return;
    }
    const batch = { seq: this.#nextSeq++, topic, payload };
    this.#counts.publishedBatches++;
    this.#counts.publishedEvents += events;
    this.#counts.publishedBytes += payload.length;
    this.#buffer.push(batch);
    this.#outbox.push(batch);
  }

  /** Events were lost before they came here: a hole in the sequence, so that consumers know that they missed something. */
  skip(): void {
    this.#pace.flush();
    this.#skip();
  }

  #skip(): void {
    this.#nextSeq++;
    this.#counts.lostBatches++;
  }

  stats(): KvEventPublisherStats {
    return {
      ...this.#counts,
      droppedBatches: this.#outbox.droppedBatches,
      queuedBatches: this.#outbox.queuedBatches,
      bufferedBatches: this.#buffer.count,
      bufferedBytes: this.#buffer.bytes,
      replays: this.#replay?.count ?? 0,
      refusedClients: this.#authenticator?.refused ?? 0,
    };
  }

  /** What is queued is still handed to ZeroMQ; subscribers that are behind lose what they have not read. */
  async close(): Promise<void> {
    this.#pace.flush();
    this.#closed = true;
    this.#outbox.close();
    await this.#bound?.close();
    this.#removeFiles();
    this.#encoder.close();
    this.#socket.close();
    await this.#replay?.close();
    await this.#authenticator?.close();
  }
}

const unixSeconds = (): number => Date.now() / 1_000;
