/**
 * Recorded runs of vLLM's own KV-cache manager, replayed op by op against ours: results, the free queue in order, reference
 * counts, hashed blocks and events must all be equal. The format is told in packages/engine/prefix-cache/vectors/README.md.
 */
import { readFileSync } from 'node:fs';
import { isDeepStrictEqual } from 'node:util';
import { gunzipSync } from 'node:zlib';
import { ChainHasher, type HashKey, integerForm, SequenceHashes } from '@kvtier/identity';
import {
  type AttentionSpec,
  type CacheHit,
  type CacheRequest,
  type KvCacheEvent,
  KvCacheManager,
  type KvCacheManagerOptions,
  type RequestDescription,
} from '@kvtier/prefix-cache';

interface RecordedGroup {
  readonly type: string;
  readonly block_size: number;
  readonly sliding_window?: number;
  readonly attention_chunk_size?: number;
  readonly mamba_cache_mode?: 'none' | 'all' | 'align';
  readonly num_speculative_blocks?: number;
}

interface RecordedConfig {
  readonly name: string;
  readonly seed: number;
  readonly num_blocks: number;
  readonly groups: readonly RecordedGroup[];
  readonly scheduler_block_size: number;
  readonly hash_block_size: number;
  readonly max_model_len: number;
  readonly max_in_flight_tokens: number;
  readonly enable_caching: boolean;
  readonly use_eagle: boolean;
  readonly num_prefill_lookahead: number;
  readonly dcp_world_size: number;
  readonly watermark: number;
  readonly prefix_cache_retention_interval: number | null;
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

export interface Recorded {
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

export interface Run {
  readonly config: RecordedConfig;
  readonly ops: readonly Recorded[];
}

class ReplayRequest implements CacheRequest {
  readonly id: string;
  readonly hashes: SequenceHashes;
  readonly description: RequestDescription;
  readonly #tokens: number[] = [];
  readonly promptTokens: number;
  computedTokens = 0;
  running = false;
  hit: CacheHit | undefined;
  sharedPrefixBoundary = 0;

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
      extraKeys: (first) => {
        const keys = [
          ...(op.lora_name ? [op.lora_name] : []),
          ...(op.cache_salt && first === 0 ? [op.cache_salt] : []),
        ];
        return keys.length > 0 ? keys : null;
      },
    };
    this.promptTokens = op.tokens.length;
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

function specOf(group: RecordedGroup): AttentionSpec {
  const blockTokens = group.block_size;
  switch (group.type) {
    case 'FullAttentionSpec':
      return { kind: 'full_attention', blockTokens };
    case 'SlidingWindowSpec':
      return { kind: 'sliding_window', blockTokens, windowTokens: group.sliding_window! };
    case 'ChunkedLocalAttentionSpec':
      return { kind: 'chunked_local_attention', blockTokens, chunkTokens: group.attention_chunk_size! };
    case 'MambaSpec': {
      const speculativeBlocks = group.num_speculative_blocks ?? 0;
      return { kind: 'mamba', blockTokens, mode: group.mamba_cache_mode ?? 'none', speculativeBlocks };
    }
    default:
      throw new Error(`the recording has an attention group that is not replayed: ${group.type}`);
  }
}

/** The first operation of a run after which something differs. */
export interface Difference {
  readonly run: string;
  readonly index: number;
  readonly op: string;
  /** What differs: the result, an event, a part of the pool. */
  readonly what: string;
  readonly expected: unknown;
  readonly actual: unknown;
}

export interface ReplayReport {
  readonly equal: number;
  readonly total: number;
  readonly first: Difference | undefined;
}

/** What a recorded file holds, gzipped or not. */
export function readRecorded(path: string | URL): unknown {
  const bytes = readFileSync(path);
  return JSON.parse((bytes[0] === 0x1f ? gunzipSync(bytes) : bytes).toString('utf8'));
}

/** Whether a file's content is a list of runs. */
export function areRuns(content: unknown): content is Run[] {
  return Array.isArray(content) && content.every((run) => run?.config?.groups && Array.isArray(run.ops));
}

/** Options of ours that must not change what was recorded. */
export type ReplayOptions = Partial<KvCacheManagerOptions>;

/** Replay every run; a run ends at its first difference, because everything after it only follows from it. */
export function replayRuns(runs: readonly Run[], options: ReplayOptions = {}): ReplayReport {
  let equal = 0;
  let first: Difference | undefined;
  for (const { config, ops } of runs) {
    const done = replayRun(config, ops, options);
    equal += done.equal;
    first ??= done.first;
  }
  return { equal, total: runs.reduce((sum, run) => sum + run.ops.length, 0), first };
}

function replayRun(
  config: RecordedConfig,
  ops: readonly Recorded[],
  options: ReplayOptions,
): Omit<ReplayReport, 'total'> {
  let replay: Replay | undefined;
  for (let index = 0; index < ops.length; index++) {
    const recorded = ops[index]!;
    const differs = (what: string, expected: unknown, actual: unknown) => ({
      equal: index,
      first: {
        run: `${config.name} seed ${config.seed}`,
        index,
        op: JSON.stringify(recorded.op),
        what,
        expected,
        actual,
      },
    });
    try {
      replay ??= new Replay(config, options);
      for (const [what, expected, actual] of replay.step(recorded))
        if (!isDeepStrictEqual(actual, expected)) return differs(what, expected, actual);
    } catch (error) {
      return differs('thrown', 'nothing', error instanceof Error ? error.stack : error);
    }
  }
  return { equal: ops.length, first: undefined };
}

/** What, as recorded, as it is here. */
type Comparison = readonly [what: string, expected: unknown, actual: unknown];

class Replay {
  readonly #manager: KvCacheManager;
  readonly #hasher: ChainHasher;
  readonly #requests = new Map<string, ReplayRequest>();

  constructor(config: RecordedConfig, options: ReplayOptions) {
    const hashTokens = config.hash_block_size;
    const interval = config.prefix_cache_retention_interval;
    this.#hasher = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens: hashTokens, rootSeed: '0' });
    this.#manager = new KvCacheManager({
      blockCount: config.num_blocks,
      blockTokens: config.scheduler_block_size,
      groups: config.groups.map(specOf),
      hashTokens,
      schedulerTokens: config.scheduler_block_size,
      maxModelTokens: config.max_model_len,
      maxInFlightTokens: config.max_in_flight_tokens,
      enableCaching: config.enable_caching,
      eagle: config.use_eagle,
      prefillLookaheadTokens: config.num_prefill_lookahead,
      contextParallel: config.dcp_world_size,
      ...(interval === null ? {} : { retentionIntervalTokens: interval }),
      watermark: config.watermark,
      enableEvents: true,
      ...options,
    });
  }

  *step({ op, res, num_free, events, state }: Recorded): Generator<Comparison> {
    const manager = this.#manager;
    yield ['result', res ?? null, this.#apply(op)];
    yield ['events', events ?? [], manager.takeEvents().map(recordedForm)];
    if (num_free !== undefined) yield ['number of free blocks', num_free, manager.freeBlockCount];
    if (state) {
      const pool = manager.snapshot();
      const hashed = pool.hashed.map(({ block, hash, group, tokens }) => [block, decimal(hash), group, tokens]);
      yield ['hashed blocks', state.hashed, hashed];
      yield ['reference counts', state.refs, Object.fromEntries(pool.refs)];
      yield ['free queue', state.free, pool.free];
      yield ['number of cached keys', state.cached, manager.cachedBlockCount];
    }
    manager.checkIntegrity();
  }

  #apply(op: RecordedOp): unknown {
    const manager = this.#manager;
    const request = this.#requests.get(op.id);
    switch (op.name) {
      case 'new_step_starts':
        manager.newStepStarts();
        return null;
      case 'new_request':
        this.#requests.set(op.id, new ReplayRequest(op, this.#hasher));
        return null;
      case 'get_computed_blocks': {
        const hit = manager.getComputedBlocks(request!);
        request!.hit = hit;
        request!.sharedPrefixBoundary = hit.sharedPrefixBoundary;
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
      case 'take_kv_cache_block_copies_and_release': {
        const copies = manager.takeBlockCopies();
        manager.releaseBlocks(copies.flatMap(({ source, target }) => [source, target]));
        return copies.map(({ source, target }) => [source, target]);
      }
      default:
        throw new Error(`the recording has an operation that is not replayed: ${op.name}`);
    }
  }

  #allocate(op: RecordedOp, request: ReplayRequest): unknown {
    const admission = op.num_new_computed_tokens !== undefined;
    const hit = admission && request.computedTokens === 0 ? request.hit : undefined;
    const external = op.num_external_computed_tokens ?? 0;
    if (hit && hit.tokens !== op.num_new_computed_tokens) throw new Error(`the hit has ${hit.tokens} tokens`);
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
