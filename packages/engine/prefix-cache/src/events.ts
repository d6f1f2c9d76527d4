/**
 * What changed in the pool, for routers and indexes (vLLM's kv_events, camelCase). Collected in memory and drained with
 * `take`; off by default. Bounded: past `maxEvents` undrained ones the oldest half is dropped and counted, so that a
 * consumer that went away cannot eat the engine's memory; it learns of the gap from `dropped`. Events are noted as words, and become objects,
 * or bytes on the wire, where they are taken: a step that stores and evicts hundreds of blocks makes no garbage for it.
 *
 * Blocks of one group that go one after the other are one record, and one event on the wire: around a hash of 9 bytes an event of its own
 * puts 60. As objects they are an event each, as vLLM makes them.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';
import type { BlockHashes, RequestDescription } from './request.ts';

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
  /** Hits of a request, told again: no copy more. */
  readonly reused?: true;
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

/**
 * Events since the last time, without an object for each: records of 32-bit words, as packages/base/data-plane/cc/kv_events.h reads them.
 * Valid until the next change of the pool.
 */
export interface PackedEvents {
  readonly words: Uint32Array;
  readonly wordCount: number;
  readonly count: number;
  /** Names of kinds of attention, by their place in records. */
  readonly kinds: readonly string[];
  /** Those that have no record of their own, in their order. */
  readonly objects: readonly KvCacheEvent[];
}

/** Blocks of a request that are findable now. */
export interface StoredRun {
  readonly hashes: BlockHashes;
  readonly description: RequestDescription | undefined;
  /** Blocks `first`..`end`-1 of the request were looked at; `blocks` of them are stored, ascending. */
  readonly first: number;
  readonly end: number;
  readonly blocks: readonly number[];
  /** Of their hashes in the chain, and of the hash before block `first`; -1 at the root. */
  readonly places: readonly number[];
  readonly parent: number;
  readonly blockTokens: number;
  readonly group: number;
  readonly kind: string;
  readonly windowTokens: number | null;
}

const objectRecord = 0;
const removedRecord = 1;
const storedRecord = 2;
const removedHead = 4;
/** Of one event: what follows it must not wait for the reading of a very long one. */
const mostRemovedHashes = 1_024;
const storedHead = 10;
const noWindow = 2 ** 32 - 1;
const kinds: readonly string[] = [
  'full_attention',
  'sliding_window',
  'chunked_local_attention',
  'mamba',
  'cross_attention',
];

export class EventLog {
  readonly enabled: boolean;
  readonly #maxEvents: number;
  /** The last words of a hash that are noted. */
  readonly #mostHashWords: number;
  #words = new Uint32Array(4_096);
  #end = 0;
  /** Where the last record begins; -1: there is none. */
  #last = -1;
  /** Records, and the events that they stand for. */
  #count = 0;
  #eventCount = 0;
  #objects: KvCacheEvent[] = [];
  #dropped = 0;

  /** `mostHashBytes`: where only the last bytes of hashes go on the wire, no others are noted; `take` needs them all. */
  constructor(enabled: boolean, maxEvents = 100_000, mostHashBytes: 8 | 32 = 32) {
    this.enabled = enabled;
    this.#maxEvents = maxEvents;
    this.#mostHashWords = mostHashBytes / 4;
  }

  /** Events lost because nobody drained them. */
  get dropped(): number {
    return this.#dropped;
  }

  add(event: KvCacheEvent): void {
    if (!this.enabled) return;
    this.#begin(objectRecord, 2);
    this.#objects.push(event);
  }

  /** The hash in `count` words of `words` from `at` on can no longer be found. They are copied. */
  addRemoved(words: Uint32Array, at: number, count: number, group: number): void {
    if (!this.enabled) return;
    if (count > this.#mostHashWords) {
      // Two words: every block that goes comes by here.
      const target = this.#roomForRemoved(2, group);
      this.#words[target] = words[at + count - 2]!;
      this.#words[target + 1] = words[at + count - 1]!;
      return;
    }
    const target = this.#roomForRemoved(count, group);
    const log = this.#words;
    if (count === 8) {
      // The usual case, without a loop: every block that goes comes by here.
      log[target] = words[at]!;
      log[target + 1] = words[at + 1]!;
      log[target + 2] = words[at + 2]!;
      log[target + 3] = words[at + 3]!;
      log[target + 4] = words[at + 4]!;
      log[target + 5] = words[at + 5]!;
      log[target + 6] = words[at + 6]!;
      log[target + 7] = words[at + 7]!;
    } else copyWords(words, at, count, log, target);
  }

  /** Where the words of one more hash go: into the last record if that is of the same kind and has not too many. */
  #roomForRemoved(count: number, group: number): number {
    const last = this.#last;
    const end = this.#end;
    const follows =
      last >= 0 &&
      this.#words[last] === removedRecord &&
      this.#words[last + 2] === group &&
      this.#words[last + 3] === count &&
      end - last < removedHead + mostRemovedHashes * count;
    if (follows && this.#eventCount < this.#maxEvents) {
      this.#makeRoom(end + count);
      this.#words[last + 1]! += count;
      this.#end = end + count;
      this.#eventCount++;
      return end;
    }
    const record = this.#begin(removedRecord, removedHead + count);
    this.#words[record + 2] = group;
    this.#words[record + 3] = count;
    return record + removedHead;
  }

  /** One BlockStored. All of it is copied. */
  addStored(run: StoredRun): void {
    if (!this.enabled) return;
    const { hashes, description, places, parent } = run;
    const packed = hashes.packedWords;
    const kind = kinds.indexOf(run.kind);
    const isPlain = description === undefined || description.isPlain === true;
    if (packed === undefined || kind < 0 || !isPlain) {
      this.add(storedEvent(run));
      return;
    }
    const tokenIds = description?.copyTokens ? undefined : tokenIdsOf(run);
    const tokens = tokenIds?.length ?? (run.end - run.first) * run.blockTokens;
    const { words, wordsPerHash } = packed;
    const noted = Math.min(wordsPerHash, this.#mostHashWords);
    const left = wordsPerHash - noted;
    const hasParent = parent >= 0 ? 1 : 0;
    const hashWords = (places.length + hasParent) * noted;
    const record = this.#begin(storedRecord, storedHead + hashWords + tokens);
    const log = this.#words;
    log[record + 2] = run.group;
    log[record + 3] = noted;
    log[record + 4] = places.length;
    log[record + 5] = tokens;
    log[record + 6] = run.blockTokens;
    log[record + 7] = run.windowTokens ?? noWindow;
    log[record + 8] = hasParent;
    log[record + 9] = kind;
    let at = record + storedHead;
    if (hasParent) at = copyWords(words, parent * wordsPerHash + left, noted, log, at);
    if (noted === 2) {
      for (let i = 0; i < places.length; i++, at += 2) {
        const from = places[i]! * wordsPerHash + left;
        log[at] = words[from]!;
        log[at + 1] = words[from + 1]!;
      }
    } else for (const place of places) at = copyWords(words, place * wordsPerHash + left, noted, log, at);
    if (tokenIds === undefined) description?.copyTokens?.(run.first * run.blockTokens, tokens, log, at);
    else log.set(tokenIds, at);
  }

  /** The blocks of the run are stored already: one of their hits is told. */
  addReused(run: StoredRun): void {
    if (this.enabled) this.add({ ...storedEvent(run), reused: true });
  }

  take(): KvCacheEvent[] {
    invariant(this.#mostHashWords === 8, 'kv events: hashes are noted in part, for a wire that has no more of them');
    const events: KvCacheEvent[] = [];
    for (let at = 0, object = 0; at < this.#end; at += this.#words[at + 1]!) {
      const kind = this.#words[at];
      if (kind === objectRecord) events.push(this.#objects[object++]!);
      else if (kind === removedRecord) this.#pushRemoved(events, at);
      else events.push(this.#storedAt(at));
    }
    this.#clear();
    return events;
  }

  takePacked(): PackedEvents {
    const packed = { words: this.#words, wordCount: this.#end, count: this.#count, kinds, objects: this.#objects };
    this.#clear();
    return packed;
  }

  #clear(): void {
    this.#end = 0;
    this.#last = -1;
    this.#count = 0;
    this.#eventCount = 0;
    if (this.#objects.length > 0) this.#objects = [];
  }

  /** Room for a record; where it is. */
  #begin(kind: number, length: number): number {
    if (this.#eventCount >= this.#maxEvents) this.#dropHalf();
    const record = this.#end;
    this.#makeRoom(record + length);
    this.#words[record] = kind;
    this.#words[record + 1] = length;
    this.#end += length;
    this.#last = record;
    this.#count++;
    this.#eventCount++;
    return record;
  }

  #makeRoom(words: number): void {
    if (words <= this.#words.length) return;
    const grown = new Uint32Array(Math.max(2 * this.#words.length, words));
    grown.set(this.#words.subarray(0, this.#end));
    this.#words = grown;
  }

  #dropHalf(): void {
    const kept = this.#maxEvents >> 1;
    let at = 0;
    let objects = 0;
    while (this.#eventCount > kept) {
      if (this.#words[at] === objectRecord) objects++;
      const events = this.#eventsAt(at);
      at += this.#words[at + 1]!;
      this.#count--;
      this.#eventCount -= events;
      this.#dropped += events;
    }
    this.#words.copyWithin(0, at, this.#end);
    this.#objects.splice(0, objects);
    this.#end -= at;
    this.#last = this.#count > 0 ? this.#last - at : -1;
  }

  #eventsAt(record: number): number {
    if (this.#words[record] !== removedRecord) return 1;
    return (this.#words[record + 1]! - removedHead) / this.#words[record + 3]!;
  }

  #pushRemoved(events: KvCacheEvent[], record: number): void {
    const groupIdx = this.#words[record + 2]!;
    const keys = this.#keys(record + removedHead, this.#eventsAt(record), this.#words[record + 3]!);
    for (const key of keys) events.push({ type: 'BlockRemoved', blockHashes: [key], medium: 'GPU', groupIdx });
  }

  #storedAt(record: number): BlockStored {
    const [group, wordsPerHash, hashes, tokens, blockSize, window, hasParent, kind] = this.#words.subarray(
      record + 2,
      record + storedHead,
    ) as unknown as [number, number, number, number, number, number, number, number];
    const first = record + storedHead + hasParent * wordsPerHash;
    const firstToken = first + hashes * wordsPerHash;
    return {
      type: 'BlockStored',
      blockHashes: this.#keys(first, hashes, wordsPerHash),
      parentBlockHash: hasParent === 1 ? this.#keys(record + storedHead, 1, wordsPerHash)[0]! : null,
      tokenIds: Array.from(this.#words.subarray(firstToken, firstToken + tokens)),
      blockSize,
      loraId: null,
      loraName: null,
      medium: 'GPU',
      extraKeys: hashes > 0 ? new Array<null>(hashes).fill(null) : null,
      groupIdx: group,
      kvCacheSpecKind: kinds[kind]!,
      kvCacheSpecSlidingWindow: window === noWindow ? null : window,
    };
  }

  #keys(at: number, count: number, wordsPerHash: number): HashKey[] {
    const bytes = Buffer.from(this.#words.buffer, at * 4, count * wordsPerHash * 4).toString('latin1');
    const hashBytes = wordsPerHash * 4;
    return Array.from({ length: count }, (_, i) => bytes.slice(i * hashBytes, (i + 1) * hashBytes) as HashKey);
  }
}

function copyWords(from: Uint32Array, at: number, count: number, to: Uint32Array, target: number): number {
  for (let word = 0; word < count; word++) to[target + word] = from[at + word]!;
  return target + count;
}

const tokenIdsOf = ({ description, first, end, blockTokens }: StoredRun): ArrayLike<number> =>
  description?.tokenIds(first * blockTokens, end * blockTokens) ?? [];

/** The run as an event, where an adapter or extra keys belong to it, or its hashes do not lie in words. */
function storedEvent(run: StoredRun): BlockStored {
  const { hashes, description, blocks, places, parent, blockTokens } = run;
  const extraKeys = blocks.map((i) => description?.extraKeys(i * blockTokens, (i + 1) * blockTokens) ?? null);
  return {
    type: 'BlockStored',
    blockHashes: keysAt(hashes, places),
    parentBlockHash: parent < 0 ? null : hashes.keyAt(parent),
    tokenIds: Array.from(tokenIdsOf(run)),
    blockSize: blockTokens,
    loraId: description?.loraId ?? null,
    loraName: description?.loraName ?? null,
    medium: 'GPU',
    extraKeys: blocks.length > 0 ? extraKeys : null,
    groupIdx: run.group,
    kvCacheSpecKind: run.kind,
    kvCacheSpecSlidingWindow: run.windowTokens,
  };
}

/** The keys at these places of a chain, in ascending order: one string for all where the hashes lie together. */
function keysAt(hashes: BlockHashes, indexes: readonly number[]): HashKey[] {
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
