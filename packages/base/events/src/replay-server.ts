/**
 * Answers who missed batches, over a ROUTER socket, in vLLM's protocol (frames.ts), and who came late, with a snapshot. One request at a time; a client that
 * does not take its answers in time loses the rest of them, and sees that from the missing end marker.
 */
import { setImmediate } from 'node:timers/promises';
import { type Context, Router } from 'zeromq';
import { decodeSeq, encodeSeq, endOfReplay, snapshotRequest } from './frames.ts';
import type { Published, ReplayBuffer } from './replay-buffer.ts';

/**
 * Bytes of one frame that somebody sends here; whoever sends a longer one is cut off. Requests are eight, subscriptions a topic, and of
 * CURVE's handshake the longest has some 300, with names of 255 bytes less than 600.
 */
export const mostFrameBytes = 1_024;
/** A client may stop reading for so long. */
const clientMs = 2_000;
/** Of making and sending an answer, in one turn of the event loop. */
const longestTurnMs = 5;

/** All that is held, as batches of one number. At the first `next` what it says is of that moment. */
export type SnapshotPages = () => Iterable<Published>;

export class ReplayServer {
  readonly socket: Router;
  readonly #buffer: ReplayBuffer;
  readonly #snapshot: SnapshotPages;
  #loop: Promise<void> | undefined;
  #count = 0;
  /** When the turn of the answer began that is made now. */
  #turnMs = 0;

  /** `maxBatches`: one whole answer waits inside ZeroMQ, so that a client of normal speed never holds others up. */
  constructor(context: Context, buffer: ReplayBuffer, snapshot: SnapshotPages, maxBatches: number) {
    this.#buffer = buffer;
    this.#snapshot = snapshot;
    // Mandatory: wait for a slow client instead of dropping out of the middle of an answer.
    const limits = { sendHighWaterMark: maxBatches + 1, sendTimeout: clientMs, maxMessageSize: mostFrameBytes };
    this.socket = new Router({ context, linger: 0, mandatory: true, ...limits });
  }

  get endpoint(): string {
    return this.socket.lastEndpoint!;
  }

  /** Requests answered. */
  get count(): number {
    return this.#count;
  }

  /** Call once, after the socket is bound. `settled`: fulfilled when nobody binds it anew, or has done so. */
  start(settled: () => Promise<void>): void {
    this.#loop = this.#run(settled);
  }

  async close(): Promise<void> {
    this.socket.close();
    await this.#loop?.catch(() => undefined); // ends because the socket closed
  }

  async #run(settled: () => Promise<void>): Promise<void> {
    for (let asked = await this.#next(settled); asked; asked = await this.#next(settled)) {
      const [client, empty, start, ...more] = asked;
      const seq = start?.equals(snapshotRequest) ? 'snapshot' : decodeSeq(start);
      if (client === undefined || empty?.length !== 0 || seq === undefined || more.length > 0) continue; // as vLLM does
      try {
        if (seq === 'snapshot') for (const batch of this.#snapshot()) await this.#send(client, batch);
        else await this.#answer(client, seq);
        await this.socket.send([client, '', '', endOfReplay, '']);
        this.#count++;
      } catch {
        // The client went away or does not read, or the socket is bound anew; it will ask again if it is still there.
      }
    }
  }

  /** The next request; undefined: the socket is closed. */
  async #next(settled: () => Promise<void>): Promise<Buffer[] | undefined> {
    while (!this.socket.closed) {
      try {
        return await this.socket.receive();
      } catch (error) {
        if (this.socket.closed) break;
        if ((error as NodeJS.ErrnoException).code !== 'EBUSY') throw error;
        await settled(); // while it is bound or unbound a socket refuses all else
      }
    }
    return undefined;
  }

  async #answer(client: Buffer, from: number): Promise<void> {
    for (let batch = this.#buffer.firstFrom(from); batch; batch = this.#buffer.firstFrom(batch.seq + 1))
      await this.#send(client, batch);
  }

  async #send(client: Buffer, { topic, seq, payload }: Published): Promise<void> {
    // A socket with room takes hundreds of parts without a turn of the event loop between.
    if (performance.now() - this.#turnMs >= longestTurnMs) {
      await setImmediate();
      this.#turnMs = performance.now();
    }
    await this.socket.send([client, '', topic, encodeSeq(seq), payload]);
  }
}
