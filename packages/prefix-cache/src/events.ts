/**
 * What changed in the pool, for routers and indexes (vLLM's kv_events, camelCase). Collected in memory and drained with
 * `take`; off by default. Bounded: past `maxEvents` undrained ones the oldest half is dropped and counted, so that a
 * consumer that went away cannot eat the engine's memory; it learns of the gap from `dropped`.
 */
import type { HashKey } from '@kvtier/identity';
import type { BlockHashes } from './request.ts';

export interface BlockStored {
  readonly type: 'BlockStored';
  readonly blockHashes: readonly HashKey[];
  /** Hash before the first one; null at the root. */
  readonly parentBlockHash: HashKey | null;
  /** The whole range, also of blocks that were skipped. */
  readonly tokenIds: readonly number[];
  readonly blockSize: number;
  readonly loraId: number | null;
  readonly loraName: string | null;
  readonly medium: 'GPU';
  /** One entry per hash; null when there is no hash. */
  readonly extraKeys: readonly (readonly unknown[] | null)[] | null;
  readonly groupIdx: number;
  readonly kvCacheSpecKind: string;
  readonly kvCacheSpecSlidingWindow: number | null;
}

export interface BlockRemoved {
  readonly type: 'BlockRemoved';
  readonly blockHashes: readonly HashKey[];
  readonly medium: 'GPU';
  readonly groupIdx: number;
}

export interface AllBlocksCleared {
  readonly type: 'AllBlocksCleared';
}

export type KvCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared;

/** A removal whose hash is still only in `#words`. */
interface Unnamed {
  readonly hashes: HashKey[];
  readonly wordCount: number;
}

const wordsPerEvent = 8;

export class EventLog {
  readonly enabled: boolean;
  readonly #maxEvents: number;
  #events: KvCacheEvent[] = [];
  #dropped = 0;
  /** Removals that have no keys yet, and their hashes: one string is made for all of them when they are taken. */
  #unnamed: Unnamed[] = [];
  #words = new Uint32Array(64 * wordsPerEvent);

  constructor(enabled: boolean, maxEvents = 100_000) {
    this.enabled = enabled;
    this.#maxEvents = maxEvents;
  }

  /** Events lost because nobody drained them. */
  get dropped(): number {
    return this.#dropped;
  }

  add(event: KvCacheEvent): void {
    if (!this.enabled) return;
    if (this.#events.length >= this.#maxEvents) {
      const half = this.#maxEvents >> 1;
      this.#dropped += this.#events.length - half;
      this.#events = this.take().slice(-half);
    }
    this.#events.push(event);
  }

  /** The hash in `count` words of `words` from `at` on can no longer be found. They are copied. */
  addRemoved(words: Uint32Array, at: number, count: number, group: number): void {
    if (!this.enabled) return;
    const hashes: HashKey[] = [];
    this.add({ type: 'BlockRemoved', blockHashes: hashes, medium: 'GPU', groupIdx: group });
    const first = this.#unnamed.length * wordsPerEvent;
    if (first === this.#words.length) {
      const grown = new Uint32Array(2 * first);
      grown.set(this.#words);
      this.#words = grown;
    }
    for (let word = 0; word < count; word++) this.#words[first + word] = words[at + word]!;
    this.#unnamed.push({ hashes, wordCount: count });
  }

  take(): KvCacheEvent[] {
    const events = this.#events;
    this.#events = [];
    if (this.#unnamed.length === 0) return events;
    const bytes = Buffer.from(this.#words.buffer, 0, this.#unnamed.length * wordsPerEvent * 4).toString('latin1');
    for (let i = 0; i < this.#unnamed.length; i++) {
      const { hashes, wordCount } = this.#unnamed[i]!;
      const at = i * wordsPerEvent * 4;
      hashes.push(bytes.substring(at, at + wordCount * 4) as HashKey);
    }
    this.#unnamed = [];
    return events;
  }
}

/** The keys at these places of a chain, in ascending order: one string for all where the hashes lie together. */
export function keysAt(hashes: BlockHashes, indexes: readonly number[]): HashKey[] {
  const packed = hashes.packedWords;
  if (packed === undefined || indexes.length < 2) return indexes.map((index) => hashes.keyAt(index));
  const { words, wordsPerHash } = packed;
  const hashBytes = wordsPerHash * 4;
  const first = indexes[0]!;
  const length = (indexes.at(-1)! + 1 - first) * hashBytes;
  const bytes = Buffer.from(words.buffer, words.byteOffset + first * hashBytes, length).toString('latin1');
  const keys = new Array<HashKey>(indexes.length);
  for (let i = 0; i < indexes.length; i++) {
    const at = (indexes[i]! - first) * hashBytes;
    keys[i] = bytes.substring(at, at + hashBytes) as HashKey;
  }
  return keys;
}
