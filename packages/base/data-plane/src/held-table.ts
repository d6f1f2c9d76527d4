/**
 * The table of held blocks, in the lock file beside an arena: written by its node, read by engines on the same host, one byte of it
 * at a time (docs/formats.md). Reading it costs a microsecond; asking the node costs the way to a process that sleeps.
 */
import { closeSync, constants, fstatSync, openSync, readSync } from 'node:fs';
import { native } from './index.ts';
import { lockFileOf } from './places.ts';

const magic = 'kvheld1\0';
export const heldTableHeaderBytes = 16;
/** The node's pulse lies behind the buckets: this, and the two words of `native.pulseStart`. */
const pulseMagic = 'kvbeat1\0';
const pulseBytes = 16;

/** What it begins with; `buckets`, a power of two, follow, a byte each. */
export function heldTableHeader(buckets: number): Buffer {
  const header = Buffer.alloc(heldTableHeaderBytes);
  header.write(magic, 'latin1');
  header.writeUInt32LE(buckets, magic.length);
  return header;
}

/** A table in which nothing is held, and a pulse that does not beat. */
export function emptyHeldTable(buckets: number): Buffer {
  const pulse = Buffer.alloc(pulseBytes);
  pulse.write(pulseMagic, 'latin1');
  return Buffer.concat([heldTableHeader(buckets), Buffer.alloc(buckets), pulse]);
}

/** Where the words of its pulse lie. */
export const pulsePlace = (buckets: number): number => heldTableHeaderBytes + buckets + pulseMagic.length;

export interface NodePulse {
  /** Of the present turn of the node's event loop, less what it waited for a processor; undefined: no beat since the last call. */
  stillMs(): number | undefined;
}

export class HeldBlocks implements NodePulse {
  readonly #fd: number;
  readonly #mask: number;
  readonly #tag: number;
  readonly #byte = new Uint8Array(1);
  readonly #pulse = Buffer.alloc(pulseBytes);
  #beats = 0;
  #closed = false;

  private constructor(fd: number, buckets: number, tag: number) {
    this.#fd = fd;
    this.#mask = buckets - 1;
    this.#tag = tag;
  }

  /** null where there is none, or one of another form. @param tag of the namespace, as the node says it (`held_tag`) */
  static open(arenaPath: string, tag: number): HeldBlocks | null {
    let fd: number;
    try {
      fd = openSync(lockFileOf(arenaPath), constants.O_RDONLY | constants.O_NOFOLLOW);
    } catch {
      return null;
    }
    try {
      const header = Buffer.alloc(heldTableHeaderBytes);
      readSync(fd, header, 0, header.length, 0);
      const buckets = header.readUInt32LE(magic.length);
      const isPower = buckets > 0 && (buckets & (buckets - 1)) === 0;
      if (isPower && header.equals(heldTableHeader(buckets)) && fstatSync(fd).size >= heldTableHeaderBytes + buckets)
        return new HeldBlocks(fd, buckets, tag);
    } catch {} // what cannot be read is no table
    closeSync(fd);
    return null;
  }

  /** Whether a tier but the peers (1), some tier (2), the arena (4) may hold the block whose hash begins at byte `at`; undefined: it is not told. */
  flags(hashes: Buffer, at: number): number | undefined {
    if (this.#closed) return undefined;
    const bucket = (hashes.readInt32LE(at) ^ this.#tag) & this.#mask;
    try {
      return readSync(this.#fd, this.#byte, 0, 1, heldTableHeaderBytes + bucket) === 1 ? this.#byte[0] : undefined;
    } catch {
      return undefined;
    }
  }

  /** The same of `count` hashes that begin `hashBytes` from each other, in half the time; undefined: not of all of them. */
  flagsOfAll(hashes: Buffer, hashBytes: number, count: number): Uint8Array | undefined {
    if (this.#closed) return undefined;
    const flags = new Uint8Array(count);
    const read = native.readBuckets(this.#fd, heldTableHeaderBytes, this.#mask, this.#tag, hashes, hashBytes, flags);
    return read === count ? flags : undefined;
  }

  stillMs(): number | undefined {
    const at = heldTableHeaderBytes + this.#mask + 1;
    const pulse = this.#pulse;
    try {
      if (this.#closed || readSync(this.#fd, pulse, 0, pulseBytes, at) < pulseBytes) return undefined;
    } catch {
      return undefined;
    }
    const beats = pulse.readUInt32LE(pulseMagic.length);
    // Of an older node nothing lies here.
    if (pulse.toString('latin1', 0, pulseMagic.length) !== pulseMagic || beats === this.#beats) return undefined;
    this.#beats = beats;
    return pulse.readUInt32LE(pulseMagic.length + 4);
  }

  close(): void {
    if (!this.#closed) closeSync(this.#fd);
    this.#closed = true;
  }
}
