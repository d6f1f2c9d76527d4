/**
 * Batches as words, for consumers of many events a second (an index of hashes): native code reads what publishers of today
 * write in one pass, without an object for an event. What it does not read, `decodeBatch` does, so that both see the same in every
 * payload; such events (of other versions, or with names that are new) are slower, not different.
 *
 * Words of many batches lie in one array, which is replaced when it is full, and lives for as long as one of its batches.
 */

import { native } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';
import { decodeBatch, oneMoreUnread } from './codec.ts';
import {
  attentionKinds,
  type BlockHash,
  type BlockStored,
  integerOf,
  type KvEvent,
  type KvEventBatch,
  media,
  type UnreadStores,
} from './event.ts';

/** Where what stands in a record. The hashes follow its head as pairs [low, high] of their integer form, then the parent, then the token ids. */
export const record = {
  /** One of `recordType`. */
  type: 0,
  /** Words of the record: the next one begins so much later. */
  length: 1,
  /** Places in `names`; -1: not said. */
  medium: 2,
  locality: 3,
  /** -1: not said. */
  group: 4,
  hashes: 5,
  /** Hashes before the first one: 0 (at the root, or not known) or 1. */
  parents: 6,
  /** Tokens of a block; 0 in records of other types than stored. */
  blockSize: 7,
  /** Kind of attention, a place in `names`, and tokens of its window; -1: not said. */
  kind: 8,
  window: 9,
  /** 1: an adapter or extra keys go into the hashes besides the tokens. */
  extra: 10,
  head: 11,
} as const;

/** `reused`: as stored, of blocks that were stored before: no copy more. */
export const recordType = { removed: 1, stored: 2, cleared: 3, reused: 4 } as const;

export interface PackedBatch {
  /** Unix time in seconds. */
  readonly ts: number;
  readonly dataParallelRank: number | null;
  /** Events, a record each. */
  readonly count: number;
  /** Their records are words `from` up to `end`; the others are not of this batch. */
  readonly words: Int32Array;
  readonly from: number;
  readonly end: number;
  /** Of media, localities and kinds of attention. Grows, so that a place keeps its meaning for all batches of one decoder. */
  readonly names: readonly string[];
  /** Not among these events. */
  readonly unread?: UnreadStores | undefined;
}

const slabWords = 64 * 1_024;
const batchHead = 6;
/** A publisher that invents names forever is refused. */
const maxNames = 64;
const maxNameBytes = 255;
/**
 * Known from the start, the most frequent ones first: a batch with a name that is new is read object by object, and the first one of a
 * publisher, which may be all that it holds, is too large for that.
 */
const firstNames = [
  ...Object.values(media),
  ...attentionKinds,
  'LOCAL',
  'REMOTE',
  'CPU_PINNED',
  'CPU_TIER1',
  'CPU_TIER2',
  'STORAGE',
  'EXTERNAL',
];
/** Of what is read object by object, so that a turn stays short: 32,768 hashes take some 25 ms. Larger batches are refused, and so a gap. */
const maxObjectBytes = 256 * 1024;
const maxObjectHashes = 32_768;

export class PackedDecoder {
  readonly #tokens: boolean;
  readonly #names: string[] = [];
  #encodedNames = Buffer.alloc(0);
  #slab = new Int32Array(slabWords);
  #end = 0;
  readonly #head = new Int32Array(2);
  readonly #ts = new Float64Array(this.#head.buffer);

  /** `tokens`: with the ids of tokens, for those who want more than hashes. */
  constructor({ tokens = false }: { readonly tokens?: boolean } = {}) {
    this.#tokens = tokens;
    for (const name of firstNames) this.#placeOf(name);
  }

  /**
   * Throws KvError PROTOCOL for what `decodeBatch` refuses, for ever new names, and for a large batch that native code does not read. Blocks
   * stored with numbers beyond a word, or with such names, are passed over.
   */
  decode(payload: Uint8Array): PackedBatch {
    let from = this.#end;
    let words = native.decodeKvEvents(payload, this.#tokens, this.#encodedNames, this.#slab, from);
    for (let room = slabWords; words === 0; room *= 4) {
      this.#slab = new Int32Array(room);
      from = 0;
      words = native.decodeKvEvents(payload, this.#tokens, this.#encodedNames, this.#slab, from);
    }
    if (words < 0) return this.#pack(decodeBatch(payload, maxObjectBytes, maxObjectHashes));
    this.#end = from + words;
    return this.batchAt(this.#slab, from);
  }

  /** What native code decoded, with these names, into `words` from word `from` on. */
  batchAt(words: Int32Array, from: number): PackedBatch {
    this.#head[0] = words[from + 4]!;
    this.#head[1] = words[from + 5]!;
    const rank = words[from + 2]!;
    return {
      ts: this.#ts[0]!,
      dataParallelRank: rank < 0 ? null : rank,
      count: words[from + 1]!,
      words,
      from: from + batchHead,
      end: from + words[from]!,
      names: this.#names,
    };
  }

  /** As native code reads them. */
  get encodedNames(): Uint8Array {
    return this.#encodedNames;
  }

  #pack({ ts, events, dataParallelRank, unread: before }: KvEventBatch): PackedBatch {
    const records: number[][] = [];
    let unread = before;
    for (const event of events) {
      try {
        records.push(this.#recordOf(event));
      } catch (error) {
        if (event.type !== 'BlockStored') throw error;
        unread = oneMoreUnread(unread, error);
      }
    }
    const words = Int32Array.from(records.flat());
    const place = { words, from: 0, end: words.length };
    return { ts, dataParallelRank, count: records.length, ...place, names: this.#names, unread };
  }

  #recordOf(event: KvEvent): number[] {
    const medium = this.#placeOf(event.medium);
    if (event.type === 'AllBlocksCleared') return [recordType.cleared, record.head, medium, -1, -1, 0, 0, 0, -1, -1, 0];
    const isStored = event.type === 'BlockStored';
    const hashes = event.blockHashes.flatMap(wordsOf);
    const parent = isStored && event.parentBlockHash !== null ? wordsOf(event.parentBlockHash) : [];
    const tokens = isStored && this.#tokens ? event.tokenIds.map(tokenWord) : [];
    return [
      isStored ? (event.reused === true ? recordType.reused : recordType.stored) : recordType.removed,
      record.head + hashes.length + parent.length + tokens.length,
      medium,
      this.#placeOf(event.locality ?? null),
      event.groupIdx ?? -1,
      event.blockHashes.length,
      parent.length / 2,
      isStored ? event.blockSize : 0,
      isStored ? this.#placeOf(event.kvCacheSpecKind) : -1,
      isStored ? (event.kvCacheSpecSlidingWindow ?? -1) : -1,
      isStored && hasExtra(event) ? 1 : 0,
      ...hashes,
      ...parent,
      ...tokens,
    ];
  }

  #placeOf(name: string | null | undefined): number {
    if (name === null || name === undefined) return -1;
    const known = this.#names.indexOf(name);
    if (known >= 0) return known;
    const bytes = Buffer.from(name);
    if (this.#names.length === maxNames || bytes.length > maxNameBytes)
      throw malformed(`more than ${maxNames} names of media, or one of more than ${maxNameBytes} bytes`);
    this.#encodedNames = Buffer.concat([this.#encodedNames, Buffer.from([bytes.length]), bytes]);
    return this.#names.push(name) - 1;
  }
}

const hasExtra = ({ loraId, loraName, extraKeys }: BlockStored): boolean =>
  loraId !== null || loraName !== null || (extraKeys?.some((keys) => keys !== null) ?? false);

function wordsOf(hash: BlockHash): [low: number, high: number] {
  const value = integerOf(hash);
  return [Number(BigInt.asIntN(32, value)), Number(BigInt.asIntN(32, value >> 32n))];
}

function tokenWord(token: number): number {
  if (Number.isInteger(token) && token >= 0 && token <= 2 ** 32 - 1) return token | 0;
  throw malformed(`the id of a token is ${token}`);
}

const malformed = (what: string): KvError =>
  new KvError('PROTOCOL', `kv events: ${what}; does the publisher speak vLLM's encoding?`);
