/**
 * Writes msgpack in the shortest form, as msgspec does. Reading is msgpackr's; writing is not, because it writes 64-bit
 * integers below 2^63 as signed ones, and bytes must be equal to vLLM's. One buffer, reused, grows to the largest batch.
 */
import { KvError } from '@kvtier/errors';

const u32Count = 2 ** 32;

export class MsgpackWriter {
  #buffer = Buffer.allocUnsafe(64 * 1024);
  #end = 0;

  /** A copy of what was written since the last call. */
  take(): Buffer {
    const written = Buffer.from(this.#buffer.subarray(0, this.#end));
    this.#end = 0;
    return written;
  }

  nil(): void {
    this.#reserve(1);
    this.#buffer[this.#end++] = 0xc0;
  }

  float(value: number): void {
    this.#reserve(9);
    this.#buffer[this.#end] = 0xcb;
    this.#buffer.writeDoubleBE(value, this.#end + 1);
    this.#end += 9;
  }

  integer(value: number | bigint): void {
    this.#reserve(9);
    const buffer = this.#buffer;
    if (typeof value === 'number' && value >= 0 && value < u32Count) {
      if (value < 0x80) buffer[this.#end++] = value;
      else this.#head(value, 0xcc, 0xcd, 0xce);
    } else if (value >= 0 && value < u32Count) {
      this.integer(Number(value));
    } else if (value >= 0) {
      buffer[this.#end] = 0xcf;
      buffer.writeBigUInt64BE(BigInt(value), this.#end + 1);
      this.#end += 9;
    } else {
      this.#negative(value);
    }
  }

  /** The last 8 bytes of a latin1 string as one unsigned integer, big-endian. */
  integerOfLast8(bytes: string): void {
    const from = bytes.length - 8;
    if ((bytes.charCodeAt(from) | bytes.charCodeAt(from + 1) | bytes.charCodeAt(from + 2)) === 0) {
      this.integer(Buffer.from(bytes.slice(from), 'latin1').readBigUInt64BE()); // may be short
      return;
    }
    this.#reserve(9);
    this.#buffer[this.#end++] = 0xcf;
    for (let i = from; i < bytes.length; i++) this.#buffer[this.#end++] = bytes.charCodeAt(i);
  }

  text(value: string): void {
    const bytes = Buffer.byteLength(value);
    this.#reserve(5 + bytes);
    if (bytes < 0x20) this.#buffer[this.#end++] = 0xa0 | bytes;
    else this.#head(bytes, 0xd9, 0xda, 0xdb);
    this.#end += this.#buffer.write(value, this.#end);
  }

  /** Bytes as they are: what was encoded before, such as names of fields. */
  encoded(bytes: Uint8Array): void {
    this.#reserve(bytes.length);
    this.#buffer.set(bytes, this.#end);
    this.#end += bytes.length;
  }

  binary(bytes: Uint8Array): void {
    this.#reserve(5 + bytes.length);
    this.#head(bytes.length, 0xc4, 0xc5, 0xc6);
    this.encoded(bytes);
  }

  array(count: number): void {
    this.#reserve(5);
    if (count < 0x10) this.#buffer[this.#end++] = 0x90 | count;
    else this.#head(count, 0, 0xdc, 0xdd);
  }

  map(count: number): void {
    this.#reserve(5);
    if (count < 0x10) this.#buffer[this.#end++] = 0x80 | count;
    else this.#head(count, 0, 0xde, 0xdf);
  }

  integers(values: ArrayLike<number>): void {
    this.array(values.length);
    for (let i = 0; i < values.length; i++) this.integer(values[i]!);
  }

  /** Anything that extra keys are made of. Throws KvError PROTOCOL for what msgpack has no word for. */
  value(value: unknown): void {
    if (value === null || value === undefined) this.nil();
    else if (typeof value === 'string') this.text(value);
    else if (typeof value === 'bigint') this.integer(value);
    else if (typeof value === 'number') Number.isSafeInteger(value) ? this.integer(value) : this.float(value);
    else if (value instanceof Uint8Array) this.binary(value);
    else if (Array.isArray(value)) {
      this.array(value.length);
      for (const element of value) this.value(element);
    } else throw new KvError('PROTOCOL', `kv events: a ${typeof value} cannot be an extra key; use text or numbers`);
  }

  #negative(value: number | bigint): void {
    const buffer = this.#buffer;
    const write = (tag: number, bytes: number): void => {
      buffer[this.#end] = tag;
      buffer.writeIntBE(Number(value), this.#end + 1, bytes);
      this.#end += 1 + bytes;
    };
    if (value >= -0x20) buffer.writeInt8(Number(value), this.#end++);
    else if (value >= -0x80) write(0xd0, 1);
    else if (value >= -0x8000) write(0xd1, 2);
    else if (value >= -0x8000_0000) write(0xd2, 4);
    else {
      buffer[this.#end] = 0xd3;
      buffer.writeBigInt64BE(BigInt(value), this.#end + 1);
      this.#end += 9;
    }
  }

  /** A number below 2^32 behind the tag of its width; a tag of 0: no such width. */
  #head(value: number, tag8: number, tag16: number, tag32: number): void {
    const buffer = this.#buffer;
    if (value < 0x100 && tag8 !== 0) {
      buffer[this.#end++] = tag8;
    } else if (value < 0x1_0000) {
      buffer[this.#end++] = tag16;
      buffer[this.#end++] = value >>> 8;
    } else {
      buffer[this.#end++] = tag32;
      buffer[this.#end++] = value >>> 24;
      buffer[this.#end++] = value >>> 16;
      buffer[this.#end++] = value >>> 8;
    }
    buffer[this.#end++] = value;
  }

  #reserve(bytes: number): void {
    if (this.#end + bytes <= this.#buffer.length) return;
    const larger = Buffer.allocUnsafe(Math.max(2 * this.#buffer.length, this.#end + bytes));
    this.#buffer.copy(larger, 0, 0, this.#end);
    this.#buffer = larger;
  }
}
