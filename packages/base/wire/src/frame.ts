/**
 * Frames of the session link: a 4-byte little-endian length, then that many bytes of one protobuf message.
 *
 *     ┌────────────┬──────────────────────┐
 *     │ u32le n    │ n bytes of message   │   1 ≤ n ≤ maxFrameBytes
 *     └────────────┴──────────────────────┘
 *
 * Invariants: the reader never holds more than twice the bytes that really arrived, whatever length a peer announces;
 * the writer never holds more than `maxPendingBytes` for a peer that does not read. Who breaks either is disconnected:
 * one peer must not be able to hurt the others.
 */
import { Buffer } from 'node:buffer';
import type { Socket } from 'node:net';
import { KvError } from '@kvtier/errors';

/** A Lookup of 500,000 32-byte hashes fits. */
export const maxFrameBytes = 16 << 20;
/** Answers that a peer has not read yet; two of the largest frames fit. */
export const maxPendingBytes = 2 * maxFrameBytes + 8;
const lengthBytes = 4;
const none = Buffer.alloc(0);
const always = (): boolean => true;

/** Cuts a byte stream into frames. One per connection; after a throw the stream is lost and must be closed. */
export class FrameReader {
  readonly #onFrame: (message: Buffer) => void;
  readonly #maxFrameBytes: number;
  /** A frame, length included, that has arrived in part; `#heldBytes` of it are here. */
  #held: Buffer = Buffer.alloc(0);
  #heldBytes = 0;

  /** @param onFrame gets each message in order; its bytes are valid during the call only, unless copied */
  constructor(onFrame: (message: Buffer) => void, limit = maxFrameBytes) {
    this.#onFrame = onFrame;
    this.#maxFrameBytes = limit;
  }

  /** Bytes of an unfinished frame. */
  get pendingBytes(): number {
    return this.#heldBytes;
  }

  /**
   * Take what arrived, a frame at a time for as long as `mayGoOn`; returns what is left of it, to be pushed before anything else. Throws KvError
   * PROTOCOL for a length of 0 or beyond the limit; passes on what `onFrame` throws.
   */
  push(chunk: Buffer, mayGoOn: () => boolean = always): Buffer {
    let rest = chunk;
    while (rest.length > 0 && mayGoOn()) {
      if (this.#heldBytes === 0) {
        // The usual case: whole frames in one chunk, no copy.
        if (rest.length >= lengthBytes) {
          const frameBytes = lengthBytes + this.#messageBytes(rest);
          if (rest.length >= frameBytes) {
            const message = rest.subarray(lengthBytes, frameBytes);
            rest = rest.subarray(frameBytes);
            this.#onFrame(message);
            continue;
          }
        }
        this.#hold(rest, rest.length);
        return none;
      }
      if (this.#heldBytes < lengthBytes) {
        const taken = this.#hold(rest, lengthBytes - this.#heldBytes);
        rest = rest.subarray(taken);
        if (this.#heldBytes < lengthBytes) return none;
      }
      const frameBytes = lengthBytes + this.#messageBytes(this.#held);
      rest = rest.subarray(this.#hold(rest, frameBytes - this.#heldBytes));
      if (this.#heldBytes < frameBytes) return none;
      const message = this.#held.subarray(lengthBytes, frameBytes);
      this.#held = Buffer.alloc(0);
      this.#heldBytes = 0;
      this.#onFrame(message);
    }
    return rest;
  }

  #messageBytes(frame: Buffer): number {
    const bytes = frame.readUInt32LE(0);
    if (bytes === 0 || bytes > this.#maxFrameBytes) {
      throw new KvError(
        'PROTOCOL',
        `session link: a frame announces ${bytes} bytes, allowed are 1 to ${this.#maxFrameBytes}; connect with a kvtier client of this version`,
      );
    }
    return bytes;
  }

  /** Append up to `wanted` bytes to the unfinished frame; returns how many there were. */
  #hold(source: Buffer, wanted: number): number {
    const bytes = Math.min(wanted, source.length);
    if (this.#heldBytes + bytes > this.#held.length) {
      const grown = Buffer.allocUnsafe(Math.max(256, 2 * this.#held.length, this.#heldBytes + bytes));
      this.#held.copy(grown, 0, 0, this.#heldBytes);
      this.#held = grown;
    }
    source.copy(this.#held, this.#heldBytes, 0, bytes);
    this.#heldBytes += bytes;
    return bytes;
  }
}

/**
 * Queue one message on a socket. Never waits. Returns false when the socket is closed, or when the peer has left
 * `limit` bytes unread: it is then destroyed with KvError DISCONNECTED.
 */
export function writeFrame(socket: Socket, message: Uint8Array, limit = maxPendingBytes): boolean {
  if (message.length === 0 || message.length > maxFrameBytes) {
    throw new KvError(
      'PROTOCOL',
      `session link: a message of ${message.length} bytes does not fit a frame; send less at once`,
    );
  }
  if (socket.destroyed || !socket.writable) return false;
  if (socket.writableLength + lengthBytes + message.length > limit) {
    socket.destroy(
      new KvError(
        'DISCONNECTED',
        `session link: the peer left ${socket.writableLength} bytes unread; it may connect again`,
      ),
    );
    return false;
  }
  const frame = Buffer.allocUnsafe(lengthBytes + message.length);
  frame.writeUInt32LE(message.length, 0);
  frame.set(message, lengthBytes);
  socket.write(frame);
  return true;
}
