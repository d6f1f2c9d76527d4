/**
 * KV events: what an engine or a tier tells others about the blocks that it holds. The words are vLLM's
 * (vllm/distributed/kv_events.py), in camelCase; the events of `@kvtier/prefix-cache` are of this shape already.
 */
import { type HashKey, integerForm } from '@kvtier/identity';

/** A chain hash as it travels: its integer form (u64) or all of its bytes. */
export type BlockHash = bigint | HashKey;

/** The form in which hashes of all publishers compare. */
export const integerOf = (hash: BlockHash): bigint => (typeof hash === 'bigint' ? hash : integerForm(hash as HashKey));

/** vLLM's names for where a block lies, and ours for the tiers that vLLM does not have. */
export const media = {
  gpu: 'GPU',
  cpu: 'CPU',
  disk: 'DISK',
  redis: 'REDIS',
  s3: 'S3',
  peer: 'PEER',
} as const;

/** vLLM's kinds of attention (KVCacheSpecKind). */
export const attentionKinds = [
  'full_attention',
  'mla_attention',
  'sliding_window',
  'sliding_window_mla',
  'mamba',
  'chunked_local_attention',
  'sink_full_attention',
  'encoder_only_attention',
  'cross_attention',
  'unknown',
] as const;

export interface BlockStored {
  readonly type: 'BlockStored';
  /** May be fewer than `tokenIds` cover (blocks outside a window), even none. */
  readonly blockHashes: readonly BlockHash[];
  /** Hash before the first one; null at the root, and where it is not known. */
  readonly parentBlockHash: BlockHash | null;
  /** Empty where only hashes are known (tiers). */
  readonly tokenIds: readonly number[];
  /** Tokens per block. */
  readonly blockSize: number;
  readonly loraId: number | null;
  /** null: from before media had names; the GPU. */
  readonly medium: string | null;
  readonly loraName: string | null;
  /** One entry per hash. */
  readonly extraKeys?: readonly (readonly unknown[] | null)[] | null;
  readonly groupIdx?: number | null;
  readonly kvCacheSpecKind?: string | null;
  readonly kvCacheSpecSlidingWindow?: number | null;
  /** LOCAL or REMOTE, as seen from the publisher. */
  readonly locality?: string | null;
  /** Ours: hits of a request, told again for those who follow it. The publisher holds no copy more. */
  readonly reused?: boolean | null;
}

export interface BlockRemoved {
  readonly type: 'BlockRemoved';
  readonly blockHashes: readonly BlockHash[];
  readonly medium: string | null;
  readonly groupIdx?: number | null;
  readonly locality?: string | null;
}

export interface AllBlocksCleared {
  readonly type: 'AllBlocksCleared';
  /** vLLM has none and means the GPU; tiers of ours say which one. */
  readonly medium?: string | null;
}

export type KvEvent = BlockStored | BlockRemoved | AllBlocksCleared;

/** Events of blocks stored that were passed over, as they could not be read: whoever lists blocks lists fewer than there are. */
export interface UnreadStores {
  readonly count: number;
  /** What was wrong with the first one. */
  readonly reason: string;
}

export interface KvEventBatch {
  /** Unix time in seconds. */
  readonly ts: number;
  readonly events: readonly KvEvent[];
  readonly dataParallelRank: number | null;
  /** Of batches that were read. */
  readonly unread?: UnreadStores | undefined;
}
