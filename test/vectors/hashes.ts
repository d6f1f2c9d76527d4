/**
 * Recorded block hashes: serialised primitives, roots, single blocks, whole requests and group keys, each computed again
 * and compared byte for byte. One entry of a file is one operation.
 */
import { isDeepStrictEqual } from 'node:util';
import {
  ChainHasher,
  encodeCbor,
  groupKey,
  type HashValue,
  hashKeyOf,
  hashOfKey,
  hashValue,
  integerForm,
  type MmFeature,
  parseHashAlgorithm,
  rootHash,
  SequenceHashes,
  serialize,
  type TokenIds,
} from '@kvtier/identity';
import type { ReplayReport } from './kv-cache-manager.ts';

type Primitive = null | number | string | { readonly bytes: string } | { readonly tuple: readonly Primitive[] };
type Extra = { readonly t: 'str' | 'bytes'; readonly v: string } | { readonly t: 'mm'; readonly v: [string, number] };

interface Block {
  readonly id: string;
  readonly pythonhashseed: string | null;
  readonly parent: string | null;
  readonly token_ids: readonly number[];
  readonly extra_keys: readonly Extra[] | null;
  /** null where it would be long. */
  readonly serialized: string | null;
  readonly hash: string;
  readonly int_u64: string;
}

interface Chain {
  readonly id: string;
  readonly pythonhashseed: string | null;
  readonly block_size: number;
  readonly prompt_token_ids: readonly number[] | null;
  readonly lora_name: string | null;
  readonly cache_salt: string | null;
  readonly mm_features: MmFeature[];
  readonly steps: readonly { readonly append?: readonly number[]; readonly num_hashes: number }[];
  readonly hashes: readonly string[];
  readonly int_u64: readonly string[];
  readonly prompt_embeds?: { readonly shape: readonly [number, number]; readonly raw_le_hex: string };
}

export interface HashFile {
  readonly cbor_primitives: readonly { readonly value: Primitive; readonly cbor: string }[];
  readonly none_hash: readonly { readonly pythonhashseed: string | null; readonly none_hash: string }[];
  readonly blocks: readonly Block[];
  readonly chains: readonly Chain[];
  readonly group_keys: readonly { readonly hash: string; readonly group_id: number; readonly key: string }[];
}

/** What an entry is called, what was recorded, and how to compute it. */
type Entry = readonly [what: string, expected: unknown, actual: () => unknown];

/** `name` is the file's: it names the algorithm. Throws KvError for an algorithm that is not known. */
export function replayHashes(name: string, file: HashFile): ReplayReport {
  let equal = 0;
  let total = 0;
  let first: ReplayReport['first'];
  for (const [op, expected, compute] of entriesOf(name, file)) {
    const actual = computed(compute);
    if (isDeepStrictEqual(actual, expected)) equal++;
    else first ??= { run: name, index: total, op, what: 'value', expected, actual };
    total++;
  }
  return { equal, total, first };
}

function* entriesOf(name: string, file: HashFile): Generator<Entry> {
  const algorithm = parseHashAlgorithm(/hash_(\w+)\.json/.exec(name)?.[1] ?? name);
  const root = (seed: string | null): Buffer => Buffer.from(rootHash(algorithm, seed ?? undefined));
  for (const { value, cbor } of file.cbor_primitives)
    yield [`primitive ${cbor}`, cbor, () => encodeCbor(primitive(value)).toString('hex')];
  for (const { pythonhashseed, none_hash } of file.none_hash)
    yield [`root of seed ${pythonhashseed}`, none_hash, () => root(pythonhashseed).toString('hex')];
  for (const block of file.blocks) {
    const { serialized, hash, int_u64 } = block;
    yield [
      `block ${block.id}`,
      { serialized, hash, int_u64 },
      () => {
        const parent = block.parent ? hex(block.parent) : root(block.pythonhashseed);
        const value: HashValue = [parent, [...block.token_ids], extraKeys(block.extra_keys)];
        const actual = Buffer.from(hashValue(algorithm, value));
        return {
          serialized: serialized === null ? null : serialize(algorithm, value).toString('hex'),
          hash: actual.toString('hex'),
          int_u64: integerForm(actual).toString(),
        };
      },
    ];
  }
  for (const chain of file.chains) {
    const counts = chain.steps.map((step) => step.num_hashes);
    const { hashes, int_u64 } = chain;
    yield [
      `chain ${chain.id}`,
      { counts, hashes, int_u64 },
      () => {
        const rootSeed = chain.pythonhashseed ?? undefined;
        return chainOf(chain, new ChainHasher({ algorithm, blockTokens: chain.block_size, rootSeed }));
      },
    ];
  }
  for (const { hash, group_id, key } of file.group_keys)
    yield [
      `group key ${group_id}`,
      key,
      () => Buffer.from(groupKey(hashKeyOf(hex(hash)), group_id), 'latin1').toString('hex'),
    ];
}

function chainOf(chain: Chain, hasher: ChainHasher): unknown {
  const embeds = chain.prompt_embeds;
  const rows = embeds && hex(embeds.raw_le_hex);
  const sequence = new SequenceHashes(hasher, {
    loraName: chain.lora_name ?? undefined,
    cacheSalt: chain.cache_salt ?? undefined,
    mmFeatures: chain.mm_features,
    promptEmbeds: embeds && rows && { rows, rowBytes: rows.length / embeds.shape[0] },
  });
  const prompt = chain.prompt_token_ids ?? new Array<number>(embeds?.shape[0] ?? 0).fill(0);
  const counts = chain.steps.map((step) => {
    sequence.append(tokenIds(step.append ?? prompt));
    return sequence.blockCount;
  });
  const keys = Array.from({ length: sequence.blockCount }, (_, i) => sequence.keyAt(i));
  return {
    counts,
    hashes: keys.map((key) => Buffer.from(hashOfKey(key)).toString('hex')),
    int_u64: keys.map((key) => integerForm(key).toString()),
  };
}

function computed(compute: () => unknown): unknown {
  try {
    return compute();
  } catch (error) {
    return `thrown: ${error instanceof Error ? error.stack : error}`;
  }
}

const hex = (text: string): Buffer => Buffer.from(text, 'hex');

function primitive(value: Primitive): HashValue {
  if (value === null || typeof value !== 'object') return value;
  return 'bytes' in value ? hex(value.bytes) : value.tuple.map(primitive);
}

function extraKeys(keys: readonly Extra[] | null): HashValue[] | null {
  return keys?.map((key) => (key.t === 'bytes' ? hex(key.v) : key.v)) ?? null;
}

function tokenIds(ids: readonly number[]): TokenIds {
  return ids.every((id) => id <= 0xffff_ffff) ? Uint32Array.from(ids) : BigUint64Array.from(ids, BigInt);
}
