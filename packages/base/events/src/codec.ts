/**
 * KV event batches as msgpack, byte for byte as vLLM writes them: `[ts, [event ...], data-parallel rank]`.
 *
 *   map    (today's)          {"type": "BlockStored", "block_hashes": [...], ...}; fields that are null by default are left out
 *   array  (before June 2026)  ["BlockStored", block_hashes, ...]; all fields that this encoding knows are written
 *
 * Reading takes both, ignores keys and events that it does not know, and tolerates arrays that are shorter or longer:
 * publishers are of many versions. Pinned by packages/base/events/vectors (`npm run vectors -- DIR`).
 */
import { KvError } from '@kvtier/errors';
import { hashKeyOf, hashOfKey } from '@kvtier/identity';
import { Unpackr } from 'msgpackr';
import type {
  AllBlocksCleared,
  BlockHash,
  BlockRemoved,
  BlockStored,
  KvEvent,
  KvEventBatch,
  UnreadStores,
} from './event.ts';
import { MsgpackWriter } from './msgpack-writer.ts';

export interface Encoding {
  readonly encoding?: 'map' | 'array';
  /** Hashes as their last 8 bytes, an integer (default, as in vLLM), or as all of their bytes. */
  readonly intBlockHashes?: boolean;
}

const unpackr = new Unpackr({ useRecords: false, mapsAsObjects: true });
const writer = new MsgpackWriter();

/** Throws KvError PROTOCOL for extra keys that msgpack has no word for. */
export function encodeBatch(batch: KvEventBatch, { encoding = 'map', intBlockHashes = true }: Encoding = {}): Buffer {
  try {
    writer.array(3);
    writer.float(batch.ts);
    writer.array(batch.events.length);
    for (const event of batch.events) {
      if (encoding === 'map') writeMap(event, intBlockHashes);
      else writeArray(event, intBlockHashes);
    }
    writer.value(batch.dataParallelRank);
  } catch (error) {
    writer.take(); // the next batch begins anew
    throw error;
  }
  return writer.take();
}

/** One event of a batch. Throws as encodeBatch does. */
export function encodeEvent(event: KvEvent, { encoding = 'map', intBlockHashes = true }: Encoding): Buffer {
  try {
    if (encoding === 'map') writeMap(event, intBlockHashes);
    else writeArray(event, intBlockHashes);
  } catch (error) {
    writer.take();
    throw error;
  }
  return writer.take();
}

/**
 * Every field is there, null by default. Events of unknown types are left out, and blocks stored that cannot be read: to know of fewer
 * blocks is never wrong, to know of one that is gone is. Throws KvError PROTOCOL for all else that cannot be read, and for more than
 * `maxBytes` or `maxHashes`.
 */
export function decodeBatch(
  payload: Uint8Array,
  maxBytes = Number.POSITIVE_INFINITY,
  maxHashes = Number.POSITIVE_INFINITY,
): KvEventBatch {
  if (payload.length > maxBytes)
    throw malformed(`a batch of ${payload.length} bytes of another form than publishers of today write`);
  let batch: unknown;
  try {
    batch = unpackr.unpack(payload);
  } catch (error) {
    throw malformed(`not msgpack (${(error as Error).message})`);
  }
  if (!Array.isArray(batch) || batch.length < 2) throw malformed('a batch is [ts, events, rank]');
  const [ts, events, rank] = batch as unknown[];
  if (!Array.isArray(events)) throw malformed('the events of a batch are an array');
  const hashes = events.reduce((sum: number, event) => sum + hashesIn(event), 0);
  if (hashes > maxHashes) throw malformed(`a batch of ${hashes} hashes of another form than publishers of today write`);
  const read: KvEvent[] = [];
  let unread: UnreadStores | undefined;
  for (const event of events) {
    try {
      const one = readEvent(event);
      if (one) read.push(one);
    } catch (error) {
      if (tagOf(event) !== 'BlockStored') throw error;
      unread = oneMoreUnread(unread, error);
    }
  }
  return {
    ts: integer(ts, 'ts'),
    events: read,
    dataParallelRank: orNull(rank, 'data_parallel_rank', count),
    ...(unread && { unread }),
  };
}

export const oneMoreUnread = (before: UnreadStores | undefined, error: unknown): UnreadStores => ({
  count: (before?.count ?? 0) + 1,
  reason: before?.reason ?? KvError.from(error).message,
});

function writeMap(event: KvEvent, intBlockHashes: boolean): void {
  if (event.type === 'AllBlocksCleared') {
    writer.map(event.medium ? 2 : 1);
    writeType(event.type);
    writeDefaulted('medium', event.medium);
    return;
  }
  const { blockHashes, medium, groupIdx, locality } = event;
  if (event.type === 'BlockRemoved') {
    writer.map(3 + countOf(groupIdx, locality));
    writeType(event.type);
    writeKey('block_hashes');
    writeHashes(blockHashes, intBlockHashes);
    writeField('medium', medium);
  } else {
    const { parentBlockHash, tokenIds, extraKeys, kvCacheSpecKind, kvCacheSpecSlidingWindow } = event;
    writer.map(8 + countOf(extraKeys, groupIdx, kvCacheSpecKind, kvCacheSpecSlidingWindow, locality, reusedOf(event)));
    writeType(event.type);
    writeKey('block_hashes');
    writeHashes(blockHashes, intBlockHashes);
    writeKey('parent_block_hash');
    writeHash(parentBlockHash, intBlockHashes);
    writeKey('token_ids');
    writer.integers(tokenIds);
    writeField('block_size', event.blockSize);
    writeField('lora_id', event.loraId);
    writeField('medium', medium);
    writeField('lora_name', event.loraName);
    writeDefaulted('extra_keys', extraKeys);
  }
  writeDefaulted('group_idx', groupIdx);
  if (event.type === 'BlockStored') {
    writeDefaulted('kv_cache_spec_kind', event.kvCacheSpecKind);
    writeDefaulted('kv_cache_spec_sliding_window', event.kvCacheSpecSlidingWindow);
  }
  writeDefaulted('locality', locality);
  if (event.type !== 'BlockStored' || reusedOf(event) === null) return;
  writeKey('reused');
  writer.encoded(yes);
}

/** `locality` came later than this encoding: it is lost. */
function writeArray(event: KvEvent, intBlockHashes: boolean): void {
  if (event.type === 'AllBlocksCleared') {
    writer.array(event.medium ? 2 : 1);
    writer.text(event.type);
    if (event.medium) writer.text(event.medium);
    return;
  }
  const reused = event.type === 'BlockStored' ? reusedOf(event) : null;
  writer.array(event.type === 'BlockStored' ? (reused === null ? 12 : 14) : 4);
  writer.text(event.type);
  writeHashes(event.blockHashes, intBlockHashes);
  if (event.type === 'BlockRemoved') {
    writer.value(event.medium);
    writer.value(event.groupIdx);
    return;
  }
  writeHash(event.parentBlockHash, intBlockHashes);
  writer.integers(event.tokenIds);
  writer.value(event.blockSize);
  writer.value(event.loraId);
  writer.value(event.medium);
  writer.value(event.loraName);
  writer.value(event.extraKeys);
  writer.value(event.groupIdx);
  writer.value(event.kvCacheSpecKind);
  writer.value(event.kvCacheSpecSlidingWindow);
  if (reused === null) return;
  writer.nil();
  writer.encoded(yes);
}

/** null: left out. */
const reusedOf = ({ reused }: BlockStored): true | null => (reused === true ? true : null);
const yes = Buffer.from([0xc3]);
const isSet = (value: unknown): boolean => value !== null && value !== undefined;
const countOf = (...values: unknown[]): number => values.filter(isSet).length;

/** Names of fields and types, encoded once. */
const encodedNames = new Map<string, Buffer>();

function writeKey(name: string): void {
  let encoded = encodedNames.get(name);
  if (!encoded) {
    encoded = Buffer.concat([Buffer.from([0xa0 | name.length]), Buffer.from(name)]); // all are shorter than 32
    encodedNames.set(name, encoded);
  }
  writer.encoded(encoded);
}

function writeType(type: KvEvent['type']): void {
  writeKey('type');
  writeKey(type);
}

function writeField(name: string, value: unknown): void {
  writeKey(name);
  writer.value(value);
}

function writeDefaulted(name: string, value: unknown): void {
  if (isSet(value)) writeField(name, value);
}

function writeHashes(hashes: readonly BlockHash[], intBlockHashes: boolean): void {
  writer.array(hashes.length);
  for (const hash of hashes) writeHash(hash, intBlockHashes);
}

/** What came as an integer stays one: its other bytes are not known. */
function writeHash(hash: BlockHash | null, intBlockHashes: boolean): void {
  if (hash === null) writer.nil();
  else if (typeof hash === 'bigint') writer.integer(hash);
  else if (intBlockHashes) writer.integerOfLast8(hash);
  else writer.binary(hashOfKey(hash));
}

/** Field names in the order of the array encoding, the tag left out. */
const storedFields = [
  'block_hashes',
  'parent_block_hash',
  'token_ids',
  'block_size',
  'lora_id',
  'medium',
  'lora_name',
  'extra_keys',
  'group_idx',
  'kv_cache_spec_kind',
  'kv_cache_spec_sliding_window',
  'locality',
  'reused',
];
const fieldsOf: Readonly<Record<string, readonly string[]>> = {
  BlockStored: storedFields,
  BlockRemoved: ['block_hashes', 'medium', 'group_idx', 'locality'],
  AllBlocksCleared: ['medium'],
};

/** vLLM counts in 32 bits with a sign. */
const maxCount = 2 ** 31 - 1;

type Fields = Readonly<Record<string, unknown>>;

function readEvent(event: unknown): KvEvent | undefined {
  if (typeof event !== 'object' || event === null) throw malformed('an event is a map or an array');
  const tag = tagOf(event);
  if (typeof tag !== 'string') throw malformed('an event names its type');
  if (!Object.hasOwn(fieldsOf, tag)) return undefined;
  const names = fieldsOf[tag]!;
  const fields: Fields = Array.isArray(event)
    ? Object.fromEntries(names.map((name, i) => [name, event[i + 1] as unknown]))
    : (event as Fields);
  if (tag === 'BlockStored') return readStored(fields);
  return tag === 'BlockRemoved' ? readRemoved(fields) : readCleared(fields);
}

const tagOf = (event: unknown): unknown => (Array.isArray(event) ? event[0] : (event as Fields | null)?.type);

/** Of an event that is not looked at yet. */
function hashesIn(event: unknown): number {
  if (typeof event !== 'object' || event === null) return 0;
  const hashes: unknown = Array.isArray(event) ? event[1] : (event as Fields).block_hashes;
  return Array.isArray(hashes) ? hashes.length : 0;
}

const readStored = ({ lora_name: loraName, ...fields }: Fields): BlockStored => ({
  type: 'BlockStored',
  blockHashes: array(fields.block_hashes, 'block_hashes', blockHash),
  parentBlockHash: orNull(fields.parent_block_hash, 'parent_block_hash', blockHash),
  tokenIds: fields.token_ids === null ? [] : array(fields.token_ids, 'token_ids', token),
  blockSize: count(fields.block_size, 'block_size'),
  loraId: orNull(fields.lora_id, 'lora_id', integer),
  medium: orNull(fields.medium, 'medium', text),
  loraName: isMap(loraName) ? null : orNull(loraName, 'lora_name', text),
  extraKeys: isMap(loraName) ? extraKeysOf(fields.block_hashes, loraName) : readExtraKeys(fields.extra_keys),
  groupIdx: orNull(fields.group_idx, 'group_idx', count),
  kvCacheSpecKind: orNull(fields.kv_cache_spec_kind, 'kv_cache_spec_kind', text),
  kvCacheSpecSlidingWindow: orNull(fields.kv_cache_spec_sliding_window, 'kv_cache_spec_sliding_window', count),
  locality: orNull(fields.locality, 'locality', text),
  ...(fields.reused === true && { reused: true }),
});

const readExtraKeys = (value: unknown): (unknown[] | null)[] | null =>
  orNull(value, 'extra_keys', (keys, name) =>
    array(keys, name, (key) => orNull(key, name, (one) => array(one, name, (part) => part))),
  );

/** SGLang tells the salt of blocks in the place where vLLM has the name of their adapter: all of them are hashed with it. */
const extraKeysOf = (hashes: unknown, metadata: Fields): unknown[][] =>
  (hashes as readonly unknown[]).map(() => Object.values(metadata));

const isMap = (value: unknown): value is Fields =>
  typeof value === 'object' && value !== null && Object.getPrototypeOf(value) === Object.prototype;

const readRemoved = (fields: Fields): BlockRemoved => ({
  type: 'BlockRemoved',
  blockHashes: array(fields.block_hashes, 'block_hashes', blockHash),
  medium: orNull(fields.medium, 'medium', text),
  groupIdx: orNull(fields.group_idx, 'group_idx', count),
  locality: orNull(fields.locality, 'locality', text),
});

const readCleared = (fields: Fields): AllBlocksCleared => ({
  type: 'AllBlocksCleared',
  medium: orNull(fields.medium, 'medium', text),
});

type Read<T> = (value: unknown, name: string) => T;

function orNull<T>(value: unknown, name: string, read: Read<T>): T | null {
  return value === null || value === undefined ? null : read(value, name);
}

function array<T>(value: unknown, name: string, read: Read<T>): T[] {
  if (!Array.isArray(value)) throw malformed(`${name} is not an array`);
  return value.map((element) => read(element, name));
}

function integer(value: unknown, name: string): number {
  if (typeof value === 'number') return value;
  if (typeof value === 'bigint') return Number(value);
  throw malformed(`${name} is not a number`);
}

/** SGLang with EAGLE tells each token with the one after it. */
function token(value: unknown, name: string): number {
  if (!Array.isArray(value) || value.length !== 2) return integer(value, name);
  integer(value[1], name);
  return integer(value[0], name);
}

/** What is counted: negative ones are lies, and would be taken for "not said" further on. */
function count(value: unknown, name: string): number {
  const number = integer(value, name);
  if (Number.isInteger(number) && number >= 0 && number <= maxCount) return number;
  throw malformed(`${name} is ${number}, not a whole number up to ${maxCount}`);
}

function text(value: unknown, name: string): string {
  if (typeof value !== 'string') throw malformed(`${name} is not text`);
  return value;
}

function blockHash(value: unknown, name: string): BlockHash {
  if (typeof value === 'bigint') return BigInt.asUintN(64, value);
  if (typeof value === 'number' && Number.isSafeInteger(value)) return BigInt.asUintN(64, BigInt(value));
  if (value instanceof Uint8Array && value.length >= 8) return hashKeyOf(value);
  throw malformed(`${name}: a hash is an integer or at least 8 bytes`);
}

const malformed = (what: string): KvError =>
  new KvError('PROTOCOL', `kv events: ${what}; does the publisher speak vLLM's encoding?`);
