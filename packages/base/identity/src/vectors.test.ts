/** Byte for byte what vLLM computes: every recorded primitive, root, block, chain and group key. */
import { readFileSync } from 'node:fs';
import { describe, expect, it } from 'vitest';
import { hashAlgorithms, hashValue, rootHash, serialize } from './algorithm.ts';
import { encodeCbor } from './encode.ts';
import {
  ChainHasher,
  type HashAlgorithm,
  type HashValue,
  hashKeyOf,
  hashOfKey,
  integerForm,
  type MmFeature,
  SequenceHashes,
  type TokenIds,
} from './index.ts';
import { groupKey, splitGroupKey } from './keys.ts';

type Primitive = null | number | string | { bytes: string } | { tuple: Primitive[] };
type Extra = { t: 'str' | 'bytes'; v: string } | { t: 'mm'; v: [string, number] };
interface Chain {
  id: string;
  pythonhashseed: string | null;
  block_size: number;
  prompt_token_ids: number[] | null;
  lora_name: string | null;
  cache_salt: string | null;
  mm_features: MmFeature[];
  steps: { append?: number[]; num_tokens: number; num_hashes: number }[];
  extra_keys_per_block: (Extra[] | null)[];
  hashes: string[];
  int_u64: string[];
  note: string;
  prompt_embeds?: { shape: [number, number]; raw_le_hex: string };
}
interface Vectors {
  cbor_primitives: { value: Primitive; cbor: string }[];
  none_hash: { pythonhashseed: string | null; none_hash: string }[];
  blocks: {
    id: string;
    pythonhashseed: string | null;
    parent: string | null;
    token_ids: number[];
    extra_keys: Extra[] | null;
    /** null where it would be long. */
    serialized: string | null;
    serialized_len: number;
    hash: string;
    int_u64: string;
  }[];
  chains: Chain[];
  group_keys: { hash: string; group_id: number; key: string }[];
}

const hex = (text: string) => Buffer.from(text, 'hex');

function primitive(value: Primitive): HashValue {
  if (value === null || typeof value !== 'object') return value;
  return 'bytes' in value ? hex(value.bytes) : value.tuple.map(primitive);
}

function extraKeys(keys: Extra[] | null): HashValue[] | null {
  return keys?.map((key) => (key.t === 'bytes' ? hex(key.v) : key.v)) ?? null;
}

function tokenIds(ids: readonly number[]): TokenIds {
  return ids.every((id) => id <= 0xffff_ffff) ? Uint32Array.from(ids) : BigUint64Array.from(ids, BigInt);
}

describe.each(hashAlgorithms)('%s', (algorithm: HashAlgorithm) => {
  const file = new URL(`../vectors/hash_${algorithm}.json`, import.meta.url);
  const vectors = JSON.parse(readFileSync(file, 'utf8')) as Vectors;

  it('the file holds what this test replays', () => {
    expect(vectors.blocks.length).toBeGreaterThan(20);
    expect(vectors.cbor_primitives.length).toBe(18);
    expect(vectors.chains.length).toBe({ sha256: 10, sha256_cbor: 10, xxhash: 0, xxhash_cbor: 9 }[algorithm]);
  });

  it.each(vectors.cbor_primitives)('primitive $cbor', ({ value, cbor }) => {
    expect(encodeCbor(primitive(value)).toString('hex')).toBe(cbor);
  });

  it.each(vectors.none_hash)('root for seed $pythonhashseed', ({ pythonhashseed, none_hash }) => {
    expect(rootHash(algorithm, pythonhashseed ?? undefined).toString('hex')).toBe(none_hash);
  });

  it.each(vectors.blocks)('block $id', (block) => {
    const parent = block.parent ? hex(block.parent) : rootHash(algorithm, block.pythonhashseed ?? undefined);
    const extra = extraKeys(block.extra_keys);
    const value: HashValue = [parent, block.token_ids, extra];
    const bytes = serialize(algorithm, value);
    expect(bytes.length).toBe(block.serialized_len);
    if (block.serialized !== null) expect(bytes.toString('hex')).toBe(block.serialized);
    expect(hashValue(algorithm, value).toString('hex')).toBe(block.hash);
    expect(integerForm(hex(block.hash))).toBe(BigInt(block.int_u64));
    if (block.token_ids.length === 0) return; // an encoder check: no block is empty
    const rootSeed = block.pythonhashseed ?? undefined;
    const hasher = new ChainHasher({ algorithm, blockTokens: block.token_ids.length, rootSeed });
    const extras = extra && [hasher.extraBytes(extra)];
    const hashed = hasher.hashBlocks(block.parent ? hex(block.parent) : null, tokenIds(block.token_ids), extras);
    expect(hashed.toString('hex')).toBe(block.hash);
  });

  if (vectors.chains.length > 0) {
    it.each(vectors.chains)('chain $id: $note', (chain) => {
      const hasher = new ChainHasher({
        algorithm,
        blockTokens: chain.block_size,
        rootSeed: chain.pythonhashseed ?? undefined,
      });
      const embeds = chain.prompt_embeds;
      const rows = embeds && hex(embeds.raw_le_hex);
      const hashes = new SequenceHashes(hasher, {
        loraName: chain.lora_name ?? undefined,
        cacheSalt: chain.cache_salt ?? undefined,
        mmFeatures: chain.mm_features,
        promptEmbeds: embeds && rows && { rows, rowBytes: rows.length / embeds.shape[0] },
      });
      const prompt = chain.prompt_token_ids ?? new Array<number>(embeds?.shape[0] ?? 0).fill(0);
      for (const step of chain.steps) {
        hashes.append(tokenIds(step.append ?? prompt));
        expect(hashes.tokenCount).toBe(step.num_tokens);
        expect(hashes.blockCount).toBe(step.num_hashes);
      }
      const keys = Array.from({ length: hashes.blockCount }, (_, i) => hashes.keyAt(i));
      expect(keys.map((key) => hashOfKey(key).toString('hex'))).toEqual(chain.hashes);
      expect(keys.map((key) => integerForm(key).toString())).toEqual(chain.int_u64);
      expect(hashes.packed.toString('hex')).toBe(chain.hashes.join(''));
    });
  }

  it.each(vectors.group_keys)('group $group_id', ({ hash, group_id, key }) => {
    const packed = groupKey(hashKeyOf(hex(hash)), group_id);
    expect(Buffer.from(packed, 'latin1').toString('hex')).toBe(key);
    expect(splitGroupKey(packed)).toEqual({ hash: hashKeyOf(hex(hash)), group: group_id });
  });
});
