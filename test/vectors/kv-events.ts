/**
 * Recorded batches of KV events: each is written in both of vLLM's encodings, and read from both. One encoding of one batch
 * in one direction is one operation.
 */
import { isDeepStrictEqual } from 'node:util';
import { type BlockHash, decodeBatch, encodeBatch, type KvEvent, type KvEventBatch } from '@kvtier/events';
import { hashKeyOf, hashOfKey } from '@kvtier/identity';
import type { ReplayReport } from './kv-cache-manager.ts';

type Json = null | number | string | boolean | readonly Json[] | { readonly [key: string]: Json };
type RecordedEvent = Readonly<Record<string, Json>>;

interface Case {
  readonly name: string;
  readonly dp_rank: number | null;
  readonly ts: number;
  readonly events: readonly RecordedEvent[];
  readonly payload_map_encoding: string;
  readonly payload_legacy_array_encoding: string;
}

export interface EventFile {
  readonly cases: readonly Case[];
}

export function areEventCases(content: unknown): content is EventFile {
  const cases = (content as Partial<EventFile> | null)?.cases;
  return Array.isArray(cases) && cases.every((one) => typeof one === 'object' && 'payload_map_encoding' in one);
}

export function replayEvents(name: string, { cases }: EventFile): ReplayReport {
  let equal = 0;
  let total = 0;
  let first: ReplayReport['first'];
  const compare = (op: string, what: string, expected: unknown, compute: () => unknown): void => {
    let actual: unknown;
    try {
      actual = compute();
    } catch (error) {
      actual = `thrown: ${error instanceof Error ? error.stack : error}`;
    }
    if (isDeepStrictEqual(actual, expected)) equal++;
    else first ??= { run: name, index: total, op, what, expected, actual };
    total++;
  };
  for (const one of cases) {
    const batch = { ts: one.ts, events: one.events.map(event), dataParallelRank: one.dp_rank };
    for (const encoding of ['map', 'array'] as const) {
      const payload = encoding === 'map' ? one.payload_map_encoding : one.payload_legacy_array_encoding;
      const op = `${one.name}, rank ${one.dp_rank}, as ${encoding}`;
      // Integers stay integers in either form of hashes; recorded bytes are whole hashes.
      compare(op, 'payload', payload, () => encodeBatch(batch, { encoding, intBlockHashes: false }).toString('hex'));
      const read = { ...one, events: encoding === 'map' ? one.events : one.events.map(withoutLocality) };
      compare(op, 'events', recorded(read), () => recorded(described(decodeBatch(Buffer.from(payload, 'hex')))));
    }
  }
  return { equal, total, first };
}

/** The array encoding is older than `locality`. */
const withoutLocality = (fields: RecordedEvent): RecordedEvent =>
  'locality' in fields ? { ...fields, locality: null } : fields;

const recorded = ({ ts, events, dp_rank }: Pick<Case, 'ts' | 'events' | 'dp_rank'>): unknown => ({
  ts,
  events,
  dp_rank,
});

function event(fields: RecordedEvent): KvEvent {
  const camel = Object.entries(fields).map(([key, value]) => [
    key.replaceAll(/_(\w)/g, (_, letter: string) => letter.toUpperCase()),
    key === 'block_hashes' ? (value as Json[]).map(hash) : key === 'parent_block_hash' ? hash(value) : extra(value),
  ]);
  return Object.fromEntries(camel) as KvEvent;
}

function hash(value: Json): BlockHash | null {
  if (value === null) return null;
  return typeof value === 'string' ? BigInt(value) : hashKeyOf(bytes(value)!);
}

const bytes = (value: Json): Buffer | undefined =>
  typeof value === 'object' && value !== null && 'bytes' in value ? Buffer.from(String(value.bytes), 'hex') : undefined;

function extra(value: Json): unknown {
  return Array.isArray(value) ? value.map(extra) : (bytes(value) ?? value);
}

function described({ ts, events, dataParallelRank }: KvEventBatch): Pick<Case, 'ts' | 'events' | 'dp_rank'> {
  const hashText = (value: BlockHash): Json =>
    typeof value === 'bigint' ? value.toString() : { bytes: hashOfKey(value).toString('hex') };
  const json = (key: string, value: unknown): Json => {
    if (key === 'blockHashes') return (value as BlockHash[]).map(hashText);
    if (key === 'parentBlockHash' && value !== null) return hashText(value as BlockHash);
    if (value instanceof Uint8Array) return { bytes: Buffer.from(value).toString('hex') };
    return Array.isArray(value) ? value.map((part) => json('', part)) : (value as Json);
  };
  const plain = (one: KvEvent): RecordedEvent =>
    Object.fromEntries(
      Object.entries(one)
        .filter(([key]) => one.type !== 'AllBlocksCleared' || key === 'type')
        .map(([key, value]) => [key.replaceAll(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`), json(key, value)]),
    );
  return { ts, events: events.map(plain), dp_rank: dataParallelRank };
}
