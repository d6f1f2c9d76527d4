/**
 * What a publisher sends, taken and decoded by native code on a thread of its own, as many messages at once as have come
 * (kv_event_receiver.h). Idea: an event loop pays for turns, not for messages.
 */
import { type KvEventBurst, type KvEventsHandle, native } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';
import 'zeromq'; // its library is the one that native code uses
import type { Arrived } from './continuity.ts';
import { type CurveClient, checkCurveClient } from './security.ts';

export interface EventReceiverOptions {
  readonly endpoint: string;
  readonly topic: string;
  readonly hwm: number;
  readonly maxMessageBytes: number;
  /** A publisher that does not answer to two of these is connected to anew. Its ZeroMQ answers, however busy it is itself. */
  readonly heartbeatMs: number;
  readonly curve: CurveClient | null;
}

/** `words` stay as they are until the burst after the next one is there. */
export interface Burst extends KvEventBurst {
  readonly words: Int32Array;
}

/** More is given back after the burst. */
const keptWords = 1 << 20;
/** A message's sequence number in two words, its topic, and whether it is decoded. */
const headWords = 4;
const none = new Uint8Array();

export class EventReceiver {
  readonly #handle: KvEventsHandle;
  /** Words of the last two bursts. Used again: new memory for each burst costs more than decoding into it. */
  #words = new Int32Array();
  #wordsBefore = new Int32Array();

  /** Subscribes; the publisher may come later. Throws KvError CONFIG for an endpoint or a key that cannot be. */
  constructor({ endpoint, topic, hwm, maxMessageBytes, heartbeatMs, curve }: EventReceiverOptions) {
    if (curve) checkCurveClient(curve);
    const keys = curve ?? { serverKey: '', publicKey: '', secretKey: '' };
    try {
      this.#handle = native.kvEventsOpen({
        ...{ ipv6: endpoint.includes('['), endpoint, topic, highWaterMark: hwm, maxMessageBytes, heartbeatMs, ...keys },
      });
    } catch (error) {
      const { message } = error as Error;
      if (!(error instanceof RangeError)) throw new KvError('SETUP', `kv events: cannot subscribe (${message})`);
      throw new KvError(
        'CONFIG',
        `${endpoint}: cannot be subscribed to (${message}); write tcp://HOST:PORT or ipc://PATH`,
      );
    }
  }

  /**
   * Messages that follow each other, as soon as there are some; null: closed. One call at a time. `names`, `tokens`: as batches for a
   * decoder with these; null: as payloads.
   */
  async next(names: Uint8Array | null, tokens: boolean): Promise<Burst | null> {
    const burst = await native.kvEventsNext(this.#handle, names, tokens);
    if (burst === null) return null;
    const { wordCount } = burst;
    let room = this.#wordsBefore;
    if (room.length < wordCount || room.length > Math.max(keptWords, wordCount)) {
      room = new Int32Array(2 ** Math.ceil(Math.log2(Math.max(wordCount, 4_096))));
    }
    this.#wordsBefore = this.#words;
    this.#words = room;
    if (native.kvEventsWords(this.#handle, room) < wordCount) return null; // closed meanwhile
    return { ...burst, words: room };
  }

  close(): void {
    native.kvEventsClose(this.#handle);
  }
}

/** The messages of a burst. Those that are decoded have no payload, but for the last one. */
export function* messagesOf<Batch>(
  { words, messages, topics, payloads, last }: Burst,
  batchAt: (words: Int32Array, from: number) => Batch,
): Generator<Arrived<Batch>> {
  let at = 0;
  let raw = 0;
  for (let i = 1; i <= messages; i++) {
    const seq = words[at + 1]! * 2 ** 32 + (words[at]! >>> 0);
    const topic = topics[words[at + 2]!]!;
    const isDecoded = words[at + 3] === 1;
    at += headWords;
    if (!isDecoded) {
      yield { seq, topic, payload: payloads[raw++]! };
      continue;
    }
    yield { seq, topic, payload: i === messages ? last : none, batch: batchAt(words, at) };
    at += words[at]!;
  }
}
