/**
 * Recorded runs of vLLM's own manager, replayed op by op: results, the free queue in order, reference counts, hashed
 * blocks and events must all be equal. See ../vectors/README.md.
 */
import { readFileSync } from 'node:fs';
import { gunzipSync } from 'node:zlib';
import { ChainHasher, type HashKey, integerForm, SequenceHashes } from '@kvtier/identity';
import { describe, expect, it } from 'vitest';
import type { CacheHit } from './coordinator.ts';
import type { KvCacheEvent } from './events.ts';
import { KvCacheManager } from './kv-cache-manager.ts';
import type { CacheRequest, RequestDescription } from './request.ts';

interface RecordedConfig {
  readonly seed: number;
  readonly num_blocks: number;
  readonly groups: readonly { readonly block_size: number }[];
  readonly max_model_len: number;
  readonly enable_caching: boolean;
  readonly watermark: number;
}

interface RecordedOp {
  readonly name: string;
  readonly id: string;
  readonly ids: readonly number[];
  readonly tokens: readonly number[];
  readonly lora_name: string | null;
  readonly cache_salt: string | null;
  readonly num_computed_tokens: number;
  readonly num_new_tokens: number;
  readonly num_new_computed_tokens?: number;
  readonly num_external_computed_tokens?: number;
  readonly num_lookahead_tokens?: number;
  readonly full_sequence_must_fit?: boolean;
  readonly has_scheduled_reqs?: boolean;
}

interface Recorded {
  readonly op: RecordedOp;
  readonly res?: unknown;
  readonly num_free?: number;
  readonly events?: readonly unknown[];
  readonly state?: {
    readonly free: readonly number[];
    readonly refs: Readonly<Record<string, number>>;
    readonly cached: number;
    readonly hashed: readonly (readonly [number, string, number, number])[];
  };
}

interface Run {
  readonly config: RecordedConfig;
  readonly ops: readonly Recorded[];
}

class ReplayRequest implements CacheRequest {
  readonly id: string;
  readonly hashes: SequenceHashes;
  readonly description: RequestDescription;
  readonly #tokens: number[] = [];
  computedTokens = 0;
  running = false;
  hit: CacheHit | undefined;

  constructor(op: RecordedOp, hasher: ChainHasher) {
    this.id = op.id;
    this.hashes = new SequenceHashes(hasher, {
      ...(op.lora_name ? { loraName: op.lora_name } : {}),
      ...(op.cache_salt ? { cacheSalt: op.cache_salt } : {}),
    });
    this.description = {
      loraId: op.lora_name ? 1 : null,
      loraName: op.lora_name,
      tokenIds: (first, end) => this.#tokens.slice(first, end),
      extraKeys: (block) => {
        const keys = [
          ...(op.lora_name ? [op.lora_name] : []),
          ...(op.cache_salt && block === 0 ? [op.cache_salt] : []),
        ];
        return keys.length > 0 ? keys : null;
      },
    };
    this.append(op.tokens);
  }

  get tokenCount(): number {
    return this.#tokens.length;
  }

  append(tokens: readonly number[]): void {
    this.#tokens.push(...tokens);
    this.hashes.append(Uint32Array.from(tokens));
  }
}

/** The recording's form of a hash: the last 8 bytes, big-endian, in decimal. */
const decimal = (hash: HashKey): string => integerForm(hash).toString();

function recordedForm(event: KvCacheEvent): unknown {
  if (event.type === 'AllBlocksCleared') return { type: event.type };
  const common = { type: event.type, block_hashes: event.blockHashes.map(decimal), medium: event.medium };
  if (event.type === 'BlockRemoved') return { ...common, group_idx: event.groupIdx };
  return {
    ...common,
    parent: event.parentBlockHash === null ? null : decimal(event.parentBlockHash),
    token_ids: event.tokenIds,
    block_size: event.blockSize,
    lora_id: event.loraId,
    lora_name: event.loraName,
    extra_keys: event.extraKeys,
    group_idx: event.groupIdx,
    kind: event.kvCacheSpecKind,
    sliding_window: event.kvCacheSpecSlidingWindow,
  };
}

class Replay {
  readonly #manager: KvCacheManager;
  readonly #hasher: ChainHasher;
  readonly #requests = new Map<string, ReplayRequest>();

  constructor(config: RecordedConfig) {
    const blockTokens = config.groups[0]!.block_size;
    this.#hasher = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens, rootSeed: '0' });
    this.#manager = new KvCacheManager({
      blockCount: config.num_blocks,
      blockTokens,
      maxModelTokens: config.max_model_len,
      enableCaching: config.enable_caching,
      watermark: config.watermark,
      enableEvents: true,
    });
  }

  step({ op, res, num_free, events, state }: Recorded): void {
    expect(this.#apply(op)).toEqual(res ?? null);
    expect(this.#manager.takeEvents().map(recordedForm)).toEqual(events ?? []);
    if (num_free !== undefined) expect(this.#manager.freeBlockCount).toBe(num_free);
    if (state) {
      const pool = this.#manager.snapshot();
      expect(pool.free).toEqual(state.free);
      expect(Object.fromEntries(pool.refs)).toEqual(state.refs);
      expect(pool.hashed.map(({ block, hash, group, tokens }) => [block, decimal(hash), group, tokens])).toEqual(
        state.hashed,
      );
      expect(this.#manager.cachedBlockCount).toBe(state.cached);
    }
    this.#manager.checkIntegrity();
  }

  #apply(op: RecordedOp): unknown {
    const manager = this.#manager;
    const request = this.#requests.get(op.id);
    switch (op.name) {
      case 'new_step_starts':
        return null;
      case 'new_request':
        this.#requests.set(op.id, new ReplayRequest(op, this.#hasher));
        return null;
      case 'get_computed_blocks': {
        const hit = manager.getComputedBlocks(request!);
        request!.hit = hit;
        return { blocks: hit.blocks, num_computed: hit.tokens, shared_prefix_boundary: hit.sharedPrefixBoundary };
      }
      case 'allocate_slots':
        return this.#allocate(op, request!);
      case 'advance':
        request!.computedTokens = op.num_computed_tokens;
        return null;
      case 'append_output':
        request!.computedTokens = op.num_computed_tokens;
        request!.append(op.tokens);
        return null;
      case 'preempt':
        manager.free(op.id);
        request!.computedTokens = 0;
        request!.running = false;
        return null;
      case 'free':
        manager.free(op.id);
        this.#requests.delete(op.id);
        return null;
      case 'get_num_common_prefix_blocks':
        return manager.commonPrefixBlocks(op.id);
      case 'reset_prefix_cache':
        return manager.resetPrefixCache();
      case 'evict_blocks_one_by_one':
        manager.evictBlocks(op.ids);
        return null;
      default:
        throw new Error(`the recording has an operation that is not replayed: ${op.name}`);
    }
  }

  #allocate(op: RecordedOp, request: ReplayRequest): unknown {
    const admission = op.num_new_computed_tokens !== undefined;
    const hit = admission && request.computedTokens === 0 ? request.hit : undefined;
    const external = op.num_external_computed_tokens ?? 0;
    if (hit) expect(hit.tokens).toBe(op.num_new_computed_tokens);
    const added = this.#manager.allocateSlots(request, op.num_new_tokens, {
      ...(hit ? { computed: hit } : {}),
      externalComputedTokens: external,
      lookaheadTokens: op.num_lookahead_tokens ?? 0,
      fullSequenceMustFit: op.full_sequence_must_fit ?? false,
      hasScheduledRequests: op.has_scheduled_reqs ?? true,
    });
    if (!admission) return added;
    if (added === null) return null;
    request.running = true;
    request.computedTokens = (hit?.tokens ?? 0) + external;
    return { new: added, table: this.#manager.blockTables(op.id) };
  }
}

describe.each(['full_bs4', 'full_bs16', 'full_nocache', 'full_watermark'])('recorded run %s', (name) => {
  const file = new URL(`../vectors/${name}.json.gz`, import.meta.url);
  const runs = JSON.parse(gunzipSync(readFileSync(file)).toString('utf8')) as Run[];
  it.each(runs.map((run) => [run.config.seed, run] as const))('seed %i', (_seed, run) => {
    const replay = new Replay(run.config);
    run.ops.forEach((recorded, index) => {
      try {
        replay.step(recorded);
      } catch (error) {
        throw new Error(`op ${index} ${JSON.stringify(recorded.op).slice(0, 200)}`, { cause: error });
      }
    });
  });
});
