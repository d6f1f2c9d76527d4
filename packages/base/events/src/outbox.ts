/**
 * What is on its way to a publisher's socket. What was published in a turn goes out together after it: an engine's step does not wait for the
 * sending. Bounded: beyond that the oldest is dropped, and can still be replayed. A PUB socket drops and never waits.
 */
import type { Publisher } from 'zeromq';
import { encodeSeq } from './frames.ts';
import type { Published } from './replay-buffer.ts';

/** Some milliseconds of work; others get their turn in between. */
const sendsPerTurn = 1_000;

export class Outbox {
  readonly #socket: Publisher;
  readonly #maxQueued: number;
  readonly #queue: Published[] = [];
  #droppedBatches = 0;
  /** Topics are few; encoded once, ZeroMQ takes them without a string of its own. */
  #topic = { text: '', frame: Buffer.alloc(0) };
  #flush: NodeJS.Immediate | undefined;

  constructor(socket: Publisher, maxQueued: number) {
    this.#socket = socket;
    this.#maxQueued = maxQueued;
  }

  get queuedBatches(): number {
    return this.#queue.length;
  }

  /** Before the socket took them. */
  get droppedBatches(): number {
    return this.#droppedBatches;
  }

  push(batch: Published): void {
    if (this.#queue.length >= this.#maxQueued) {
      this.#queue.shift();
      this.#droppedBatches++;
    }
    this.#queue.push(batch);
    this.#flush ??= setImmediate(this.#sendSome);
  }

  /** What is queued is still handed to ZeroMQ. Before the socket is closed. */
  close(): void {
    while (this.#queue.length > 0) this.#sendSome();
    if (this.#flush) clearImmediate(this.#flush);
  }

  readonly #sendSome = (): void => {
    const batches = this.#queue.splice(0, sendsPerTurn);
    this.#flush = this.#queue.length > 0 ? setImmediate(this.#sendSome) : undefined;
    for (const { topic, seq, payload } of batches) {
      try {
        this.#socket.send([this.#topicFrame(topic), encodeSeq(seq), payload]).catch(this.#dropped);
      } catch {
        this.#dropped();
      }
    }
  };

  readonly #dropped = (): void => {
    this.#droppedBatches++;
  };

  #topicFrame(text: string): Buffer {
    if (text !== this.#topic.text) this.#topic = { text, frame: Buffer.from(text) };
    return this.#topic.frame;
  }
}
