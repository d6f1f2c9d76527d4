/**
 * Chain hashes: H(parent, tokens, extra keys) of every full block, a whole prompt in one native call, and incrementally as
 * a sequence grows. Invariant: the hash of block i depends on every token and extra key up to the end of block i and on
 * nothing else, so equal hashes mean equal prefixes.
 */
import { Buffer } from 'node:buffer';
import { native } from '@kvtier/data-plane';
import { invariant, KvError } from '@kvtier/errors';
import { hashAlgorithms, hashBytesOf, isCbor, rootHash } from './algorithm.ts';
import { type HashValue, pickleFrameBytesMax } from './encode.ts';
import { ExtraKeys, type RequestIdentity, serializeExtraKeys } from './extra-keys.ts';
import { hashKeyAt } from './keys.ts';
import type { HashAlgorithm, HashKey } from './types.ts';

/** Token ids; 64 bits wide only where an id does not fit into 32. */
export type TokenIds = Uint32Array | BigUint64Array;

/** A larger block is a mistake in a unit. */
const blockTokensMax = 65_536;
/** Most bytes of one token id in a pickle. */
const pickleTokenBytesMax = 11;

export class ChainHasher {
  readonly algorithm: HashAlgorithm;
  readonly blockTokens: number;
  readonly hashBytes: 16 | 32;
  /** Parent of the first block of every chain. */
  readonly root: Buffer;
  readonly #number: number;
  /** Bytes that the extra keys of one block may take. */
  readonly #extraBytesMax: number;

  /** `rootSeed`: what vLLM takes from PYTHONHASHSEED; by default vLLM's own default. */
  constructor(options: { algorithm: HashAlgorithm; blockTokens: number; rootSeed?: string | undefined }) {
    const { algorithm, blockTokens } = options;
    const tokensMax = isCbor(algorithm) ? blockTokensMax : Math.floor(pickleFrameBytesMax / 2 / pickleTokenBytesMax);
    if (!Number.isInteger(blockTokens) || blockTokens < 1 || blockTokens > tokensMax) {
      throw new KvError(
        'CONFIG',
        `block tokens ${blockTokens}: a whole number from 1 to ${tokensMax} for ${algorithm}`,
      );
    }
    this.algorithm = algorithm;
    this.blockTokens = blockTokens;
    this.hashBytes = hashBytesOf(algorithm);
    this.root = rootHash(algorithm, options.rootSeed);
    this.#number = hashAlgorithms.indexOf(algorithm);
    this.#extraBytesMax = isCbor(algorithm) ? 1 << 20 : pickleFrameBytesMax - 64 - blockTokens * pickleTokenBytesMax;
  }

  /**
   * Hashes of the full blocks of `tokens`, packed; a tail that is not a full block is left out.
   * `parent`: the last hash before them; null or empty is the root. `extras`: per block, see extraBytes.
   */
  hashBlocks(parent: Uint8Array | null, tokens: TokenIds, extras: (Uint8Array | null)[] | null = null): Buffer {
    const count = Math.floor(tokens.length / this.blockTokens);
    const out = Buffer.allocUnsafe(count * this.hashBytes);
    this.hashInto(out, parent, tokens.subarray(0, count * this.blockTokens), extras);
    return out;
  }

  /** Extra keys of one block as hashBlocks takes them. KvError REQUEST when they are longer than any sane request's. */
  extraBytes(keys: readonly HashValue[]): Buffer {
    const bytes = serializeExtraKeys(this.algorithm, keys);
    if (bytes.length > this.#extraBytesMax) {
      throw new KvError(
        'REQUEST',
        `adapter, salt and content hashes of one block take ${bytes.length} bytes; shorten them`,
      );
    }
    return bytes;
  }

  /** The same into `out`; `tokens` is a whole number of blocks. Returns how many. */
  hashInto(
    out: Uint8Array,
    parent: Uint8Array | null,
    tokens: TokenIds,
    extras: (Uint8Array | null)[] | null = null,
  ): number {
    for (const extra of extras ?? []) invariant(extra === null || extra.length <= this.#extraBytesMax, 'extra keys');
    const from = parent === null || parent.length === 0 ? this.root : parent;
    invariant(from.length === this.hashBytes, () => `a parent hash of ${from.length} bytes for ${this.algorithm}`);
    return native.hashBlocks(this.#number, from, tokens, this.blockTokens, extras, out);
  }
}

/** The hashes of one growing sequence. Append-only: what `packed`, `slice` and `keyAt` returned stays true. */
export class SequenceHashes {
  readonly hasher: ChainHasher;
  readonly #extras: ExtraKeys | null;
  /** Extra keys of blocks behind the first that hold nothing but the adapter are all equal: serialised once. */
  #lastKeys = '';
  #lastExtra: Buffer | null = null;
  #hashes: Buffer = Buffer.alloc(0);
  #blockCount = 0;
  /** Tokens behind the last full block: fewer than blockTokens. */
  #tail: TokenIds;
  #tailCount = 0;
  readonly #keys: HashKey[] = [];
  /** `packedWords`, and the bytes that it is a view of. */
  #words: { readonly words: Uint32Array; readonly wordsPerHash: number } = {
    words: new Uint32Array(0),
    wordsPerHash: 8,
  };
  #wordsOf: Buffer | null = null;

  constructor(hasher: ChainHasher, identity: RequestIdentity = {}) {
    this.hasher = hasher;
    const extras = new ExtraKeys(identity);
    this.#extras = extras.none ? null : extras;
    this.#tail = new Uint32Array(hasher.blockTokens);
  }

  /** Full blocks so far. */
  get blockCount(): number {
    return this.#blockCount;
  }

  get tokenCount(): number {
    return this.#blockCount * this.hasher.blockTokens + this.#tailCount;
  }

  /** All hashes in chain order: a view, blockCount × hashBytes bytes. */
  get packed(): Buffer {
    return this.#hashes.subarray(0, this.#blockCount * this.hasher.hashBytes);
  }

  /** `packed` as 32-bit words, for tables that compare hashes without making keys. Valid until the chain grows. */
  get packedWords(): { readonly words: Uint32Array; readonly wordsPerHash: number } {
    if (this.#wordsOf !== this.#hashes) {
      this.#wordsOf = this.#hashes;
      const words = new Uint32Array(this.#hashes.buffer, this.#hashes.byteOffset, this.#hashes.length / 4);
      this.#words = { words, wordsPerHash: this.hasher.hashBytes / 4 };
    }
    return this.#words;
  }

  /** The hashes of blocks [first, end), packed: a view. */
  slice(first: number, end: number = this.#blockCount): Buffer {
    return this.packed.subarray(first * this.hasher.hashBytes, end * this.hasher.hashBytes);
  }

  /** The hash of block `index` as a map key; made once. */
  keyAt(index: number): HashKey {
    invariant(index >= 0 && index < this.#blockCount, () => `block ${index} of ${this.#blockCount}`);
    for (let i = this.#keys.length; i <= index; i++) this.#keys.push(hashKeyAt(this.#hashes, i, this.hasher.hashBytes));
    return this.#keys[index]!;
  }

  /** More tokens; hashes the blocks that became full and returns how many. Keeps no reference to `tokens`. */
  append(tokens: TokenIds): number {
    const { blockTokens } = this.hasher;
    const ids = this.#widthOf(tokens);
    const added = Math.floor((this.#tailCount + ids.length) / blockTokens);
    // All extra keys before anything changes: they may be refused.
    const extras = this.#extrasOf(added);
    this.#reserve(this.#blockCount + added);
    let taken = 0;
    if (this.#tailCount > 0) {
      taken = Math.min(blockTokens - this.#tailCount, ids.length);
      this.#fillTail(ids, 0, taken);
      if (this.#tailCount === blockTokens) {
        this.#tailCount = 0;
        this.#hash(this.#tail, extras?.slice(0, 1) ?? null);
      }
    }
    const whole = taken + Math.floor((ids.length - taken) / blockTokens) * blockTokens;
    if (whole > taken) this.#hash(ids.subarray(taken, whole), extras?.slice(taken > 0 ? 1 : 0) ?? null);
    this.#fillTail(ids, whole, ids.length);
    return added;
  }

  #hash(ids: TokenIds, extras: (Buffer | null)[] | null): void {
    const { hashBytes } = this.hasher;
    const at = this.#blockCount * hashBytes;
    const parent = at === 0 ? null : this.#hashes.subarray(at - hashBytes, at);
    this.#blockCount += this.hasher.hashInto(this.#hashes.subarray(at), parent, ids, extras);
  }

  /** Tail and new tokens must be of one width; both become wide with the first wide id. */
  #widthOf(tokens: TokenIds): TokenIds {
    if (tokens instanceof BigUint64Array) {
      if (this.#tail instanceof Uint32Array) this.#tail = widen(this.#tail);
      return tokens;
    }
    return this.#tail instanceof Uint32Array ? tokens : widen(tokens);
  }

  #fillTail(ids: TokenIds, first: number, end: number): void {
    for (let i = first; i < end; i++) this.#tail[this.#tailCount++] = ids[i]!;
  }

  #extrasOf(added: number): (Buffer | null)[] | null {
    const keys = this.#extras;
    if (keys === null || added === 0) return null;
    const { blockTokens } = this.hasher;
    const start = this.#blockCount * blockTokens;
    keys.beginRun(start);
    return Array.from({ length: added }, (_, i) => {
      const values = keys.next(start + i * blockTokens, start + (i + 1) * blockTokens);
      if (values === null) return null;
      const only = values.length === 1 && typeof values[0] === 'string' ? values[0] : null;
      if (only !== null && only === this.#lastKeys && this.#lastExtra !== null) return this.#lastExtra;
      const extra = this.hasher.extraBytes(values);
      if (only !== null) {
        this.#lastKeys = only;
        this.#lastExtra = extra;
      }
      return extra;
    });
  }

  #reserve(blocks: number): void {
    const bytes = blocks * this.hasher.hashBytes;
    if (bytes <= this.#hashes.length) return;
    // Of its own memory: `packedWords` views it from a multiple of 4. What is not hashed yet is never read.
    const grown = Buffer.allocUnsafeSlow(Math.max(bytes, 2 * this.#hashes.length));
    this.packed.copy(grown);
    this.#hashes = grown;
  }
}

function widen(tokens: Uint32Array): BigUint64Array {
  return BigUint64Array.from(tokens, BigInt);
}
