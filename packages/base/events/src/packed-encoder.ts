/**
 * Batches of what a block pool has noted as words, encoded by native code in one pass, byte for byte as `encodeBatch` encodes their
 * events. Payloads are pieces of larger buffers: making one of its own for each costs more than the encoding. So does a first write to
 * new memory: buffers are used again after they were collected, and while there are none the next is prepared beside the engine's steps.
 */
import { native } from '@kvtier/data-plane';
import { type Encoding, encodeEvent } from './codec.ts';
import type { KvEvent } from './event.ts';

/** `PackedEvents` of `@kvtier/prefix-cache`, which this package stands below. */
export interface PackedEvents {
  readonly words: Uint32Array;
  readonly wordCount: number;
  readonly count: number;
  readonly kinds: readonly string[];
  readonly objects: readonly KvEvent[];
}

/** A huge page. */
const slabBytes = 2 * 2 ** 20;
/** Native code asks for this much room: see kBytesPerWord and kBytesPerEvent there. */
const mostBytesOf = ({ wordCount, count }: PackedEvents): number => 64 + wordCount * 5 + count * 320;

export class PackedEncoder {
  readonly #encoding: Encoding;
  #keptBytes: number;
  #slab: Buffer = Buffer.alloc(0);
  #end = 0;
  #spare: Buffer | undefined;
  #isPreparing = false;
  #kinds: readonly string[] = [];
  #kindNames = Buffer.alloc(0);

  /**
   * `heldBytes`: of payloads that somebody holds at a time. As many may wait for use once they are collected, which V8 does in waves of
   * some such size: with room for less, each wave's memory is given back to the kernel, and made and cleared again.
   */
  constructor(encoding: Encoding, heldBytes = 0) {
    this.#encoding = encoding;
    this.#keptBytes = heldBytes;
    native.keepPages(heldBytes);
  }

  /** Gives back the memory that waits for use. Nothing is encoded afterwards. */
  close(): void {
    native.keepPages(-this.#keptBytes);
    this.#keptBytes = 0;
  }

  /** Throws KvError PROTOCOL for extra keys that msgpack has no word for. */
  encode(packed: PackedEvents, ts: number, rank: number | null): Buffer {
    const { words, wordCount, count, objects } = packed;
    const { encoding = 'map', intBlockHashes = true } = this.#encoding;
    const encoded = objects.length === 0 ? null : objects.map((event) => encodeEvent(event, this.#encoding));
    let most = mostBytesOf(packed);
    for (const { length } of encoded ?? []) most += length;
    if (this.#end + most > this.#slab.length) {
      this.#slab = this.#newSlab(most);
      this.#end = 0;
    }
    const from = this.#end;
    const [asArray, fullHashes] = [encoding === 'array', !intBlockHashes];
    const kinds = this.#namesOf(packed.kinds);
    const slab = this.#slab;
    this.#end += native.encodeKvEvents(
      words,
      wordCount,
      count,
      ts,
      rank ?? -1,
      asArray,
      fullHashes,
      kinds,
      encoded,
      slab,
      from,
    );
    return slab.subarray(from, this.#end);
  }

  #newSlab(bytes: number): Buffer {
    const spare = this.#spare;
    if (spare && spare.length >= bytes) this.#spare = undefined;
    if (!this.#isPreparing && !this.#spare) void this.#prepare();
    return spare && spare.length >= bytes ? spare : Buffer.from(native.allocatePages(Math.max(slabBytes, bytes)));
  }

  async #prepare(): Promise<void> {
    this.#isPreparing = true;
    try {
      this.#spare = Buffer.from(await native.preparePages(slabBytes));
    } catch {
      // No memory now: asked for again, or said, when it is needed.
    }
    this.#isPreparing = false;
  }

  #namesOf(kinds: readonly string[]): Buffer {
    if (kinds !== this.#kinds) {
      this.#kinds = kinds;
      this.#kindNames = Buffer.concat(
        kinds.map((kind) => Buffer.concat([Buffer.from([kind.length]), Buffer.from(kind)])),
      );
    }
    return this.#kindNames;
  }
}
