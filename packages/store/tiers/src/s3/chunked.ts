/**
 * A small body that comes in chunks (RFC 9112, 7.1), as gateways pass them on that do not know its length yet.
 * Invariant: each byte is looked at once, however the body is cut on its way.
 */
import { Buffer } from 'node:buffer';

const lineEnd = '\r\n';
const lineBytesMax = 256;

export class ChunkedBody {
  readonly #bytesMax: number;
  /** Where the next chunk begins. */
  #at = 0;
  /** Of what was received: where each chunk begins and ends. */
  readonly #chunks: (readonly [number, number])[] = [];
  #bytes = 0;

  constructor(bytesMax: number) {
    this.#bytesMax = bytesMax;
  }

  /** `received`: all of it until now. Undefined: there is more to come; 'large': more than it may have. */
  read(received: Buffer): Buffer | 'large' | 'damaged' | undefined {
    for (;;) {
      const end = received.subarray(0, this.#at + lineBytesMax).indexOf(lineEnd, this.#at);
      if (end === -1) return received.length - this.#at < lineBytesMax ? undefined : 'damaged';
      const [, digits] = /^([\da-f]{1,8})[ \t]*(?:;.*)?$/i.exec(received.toString('latin1', this.#at, end)) ?? [];
      if (digits === undefined) return 'damaged';
      const bytes = Number.parseInt(digits, 16);
      if (bytes === 0) {
        // Behind the last one there may be more headers.
        if (received.indexOf(lineEnd + lineEnd, end) !== -1) return this.#joined(received);
        return received.length > 2 * this.#bytesMax ? 'large' : undefined;
      }
      const from = end + lineEnd.length;
      if (this.#bytes + bytes > this.#bytesMax || from > 2 * this.#bytesMax) return 'large';
      const to = from + bytes;
      if (received.length < to + lineEnd.length) return undefined;
      if (received.toString('latin1', to, to + lineEnd.length) !== lineEnd) return 'damaged';
      this.#chunks.push([from, to]);
      this.#bytes += bytes;
      this.#at = to + lineEnd.length;
    }
  }

  #joined(received: Buffer): Buffer {
    return Buffer.concat(this.#chunks.map(([from, to]) => received.subarray(from, to)));
  }
}
