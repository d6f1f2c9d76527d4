/**
 * From a model's attention groups to their managers and the coordinator that fits: the one place that knows all kinds.
 * After vLLM's get_kv_cache_coordinator, with its conditions as errors that say how to mend them.
 */
import { KvError } from '@kvtier/errors';
import { type AttentionSpec, checkSpec, seesWholePrefix, specKey, tokensPerBlock } from './attention-spec.ts';
import type { BlockPool } from './block-pool.ts';
import { ChunkedLocalManager } from './chunked-local.ts';
import { type Coordinator, UncachedCoordinator, UnitaryCoordinator } from './coordinator.ts';
import { CrossAttentionManager } from './cross-attention.ts';
import { FullAttentionManager } from './full-attention.ts';
import { HybridCoordinator } from './hybrid-coordinator.ts';
import { MambaManager } from './mamba.ts';
import { RswaManager } from './rswa.ts';
import type { ManagerOptions, SingleTypeManager } from './single-type-manager.ts';
import { SinkAttentionManager } from './sink-attention.ts';
import { SlidingWindowManager } from './sliding-window.ts';

export interface CoordinatorConfig {
  /** Tokens per block; of the one group of full attention when `groups` is not given. */
  readonly blockTokens: number;
  readonly maxModelTokens: number;
  /** Off: blocks are only allocated and freed. Default on. */
  readonly enableCaching?: boolean;
  /** Attention groups; default: one of full attention. */
  readonly groups?: readonly AttentionSpec[];
  /** Tokens per hash of the requests; divides every group's blocks. Default: the only group's block. */
  readonly hashTokens?: number;
  /** Tokens that a hit of several groups is a multiple of; default: the least common multiple of their blocks. */
  readonly schedulerTokens?: number;
  /** Ranks that share each block of attention (context parallelism). Default 1. */
  readonly contextParallel?: number;
  /** A draft model recomputes the last block of a hit in these groups; true: in all. Default none. */
  readonly eagle?: boolean | readonly number[];
  /** Tokens that a draft model prefills ahead. Default 0. */
  readonly prefillLookaheadTokens?: number;
  /** Undefined: sparse groups keep every aligned end; 0: only the ends that requests name; else also every multiple. */
  readonly retentionIntervalTokens?: number;
  /** Most tokens of one request in steps that run at once; default: the longest sequence. */
  readonly maxInFlightTokens?: number;
  /** The executor zeroes blocks before their first use: collect them for takeNewBlockIds. Default off. */
  readonly recordNewBlocks?: boolean;
  /**
   * When a block fills up with content that is cached already, the table names that block from then on and the own one is
   * free (vLLM V0). Blocks must then be cached by `cacheBlocks`, after the step that filled them. Default off. States keep
   * their own blocks.
   */
  readonly dedupBlocks?: boolean;
}

/** Throws KvError CONFIG when the groups do not go together. */
export function createCoordinator(pool: BlockPool, config: CoordinatorConfig): Coordinator {
  const specs = config.groups ?? [{ kind: 'full_attention', blockTokens: config.blockTokens } as const];
  const contextParallel = config.contextParallel ?? 1;
  specs.forEach(checkSpec);
  const blockTokens = specs.map((spec) => tokensPerBlock(spec, contextParallel));
  const schedulerTokens = config.schedulerTokens ?? blockTokens.reduce(leastCommonMultiple, 1);
  const hashTokens = config.hashTokens ?? blockTokens.reduce(greatestCommonDivisor, 0);
  const eagleGroups = eagleGroupsOf(config, specs.length);
  const partialHits = allowsPartialHits(specs, blockTokens, hashTokens, contextParallel);
  check(config, specs, { schedulerTokens, hashTokens, blockTokens, anyEagle: eagleGroups.size > 0 });
  const sinkBlocks = specs.reduce(
    (sum, spec) => sum + (spec.kind === 'sink_full_attention' ? spec.sinkTokens / spec.blockTokens : 0),
    0,
  );
  if (sinkBlocks > pool.freeCount)
    throw new KvError('CONFIG', `prefix cache: sinks take ${sinkBlocks} of ${pool.freeCount} blocks; give it more`);
  const managers = specs.map((spec, group) =>
    createManager(spec, {
      pool,
      group,
      blockTokens: blockTokens[group]!,
      hashTokens,
      alignmentTokens: specs.length === 1 ? blockTokens[group]! : schedulerTokens,
      useEagle: eagleGroups.has(group),
      partialHits,
      maxInFlightTokens: config.maxInFlightTokens ?? config.maxModelTokens,
      maxModelTokens: config.maxModelTokens,
      recordNewBlocks: config.recordNewBlocks ?? false,
      replaceDuplicates: (config.dedupBlocks ?? false) && spec.kind !== 'mamba',
    }),
  );
  const options = {
    managers,
    eagleGroups,
    reprefillableTokens: Math.max(0, (config.prefillLookaheadTokens ?? 0) - 1),
    retentionIntervalTokens: config.retentionIntervalTokens,
  };
  if (config.enableCaching === false) return new UncachedCoordinator(options);
  if (specs.length === 1) return new UnitaryCoordinator(options);
  const keyed = specs.map((spec) => ({ key: specKey(spec), wholePrefix: seesWholePrefix(spec) }));
  return new HybridCoordinator({ ...options, specs: keyed, schedulerTokens, hashTokens, partialHits });
}

function createManager(spec: AttentionSpec, options: ManagerOptions): SingleTypeManager {
  switch (spec.kind) {
    case 'full_attention':
    case 'mla_attention':
      return new FullAttentionManager(options, spec.kind);
    case 'sliding_window':
      return new SlidingWindowManager(options, spec.windowTokens);
    case 'chunked_local_attention':
      return new ChunkedLocalManager(options, spec.chunkTokens);
    case 'mamba':
      return new MambaManager(options, spec);
    case 'cross_attention':
      return new CrossAttentionManager(options);
    case 'sink_full_attention':
      return new SinkAttentionManager(options, spec.sinkTokens);
    case 'rswa':
      return new RswaManager(options, spec.windowTokens);
  }
}

function eagleGroupsOf({ eagle }: CoordinatorConfig, groupCount: number): Set<number> {
  if (!eagle) return new Set();
  return new Set(eagle === true ? Array.from({ length: groupCount }, (_, group) => group) : eagle);
}

/** States only at the ends of steps, in blocks coarser than the hash: then a prompt may end, and be hit, inside one. */
function allowsPartialHits(
  specs: readonly AttentionSpec[],
  blockTokens: readonly number[],
  hashTokens: number,
  contextParallel: number,
): boolean {
  if (specs.length < 2) return false;
  const coarse = specs.some(
    (spec, group) =>
      spec.kind === 'mamba' &&
      spec.mode === 'align' &&
      (contextParallel > 1 ? blockTokens[group]! >= hashTokens : blockTokens[group]! > hashTokens),
  );
  return (
    coarse &&
    specs.every((spec, group) => seesWholePrefix(spec) || spec.kind === 'mamba' || blockTokens[group] === hashTokens)
  );
}

interface Sizes {
  readonly schedulerTokens: number;
  readonly hashTokens: number;
  readonly blockTokens: readonly number[];
  readonly anyEagle: boolean;
}

function check(config: CoordinatorConfig, specs: readonly AttentionSpec[], sizes: Sizes): void {
  const refuse = (message: string): never => {
    throw new KvError('CONFIG', `prefix cache: ${message}`);
  };
  const { schedulerTokens, hashTokens, blockTokens } = sizes;
  const caching = config.enableCaching !== false;
  const kinds = new Set(specs.map(({ kind }) => kind));
  for (const tokens of blockTokens) {
    if (tokens % hashTokens !== 0) refuse(`blocks of ${tokens} tokens are not whole hashes of ${hashTokens}`);
    if (schedulerTokens % tokens !== 0)
      refuse(`schedulerTokens ${schedulerTokens} is no multiple of blocks of ${tokens}`);
  }
  if (!caching) return;
  if (kinds.has('cross_attention')) refuse('cross attention cannot be cached; set enableCaching to false');
  if ((config.contextParallel ?? 1) > 1 && specs.some((spec) => !seesWholePrefix(spec) && spec.kind !== 'mamba'))
    refuse('context parallelism works with full attention and state-space layers only');
  if (sizes.anyEagle && kinds.has('chunked_local_attention')) refuse('chunked local attention has no draft models');
  if (sizes.anyEagle && schedulerTokens < (config.prefillLookaheadTokens ?? 0))
    refuse(`prefillLookaheadTokens must be at most schedulerTokens (${schedulerTokens})`);
  specs.forEach((spec, group) => {
    if (spec.kind === 'chunked_local_attention' && blockTokens[group] !== schedulerTokens)
      refuse(`group ${group}: blocks of chunked local attention must have schedulerTokens (${schedulerTokens})`);
  });
  if (specs.length > 1 && new Set(specs.map(specKey)).size === 1)
    refuse('all groups have one spec; make them one group');
  const interval = config.retentionIntervalTokens;
  if (interval === undefined || interval === 0) return;
  const sparse = kinds.has('sliding_window') || kinds.has('mamba');
  if (!sparse) refuse('retentionIntervalTokens needs a group with a window or states; leave it out');
  if (interval < 0 || interval % schedulerTokens !== 0)
    refuse(`retentionIntervalTokens ${interval} is no multiple of schedulerTokens (${schedulerTokens})`);
}

function greatestCommonDivisor(a: number, b: number): number {
  return b === 0 ? a : greatestCommonDivisor(b, a % b);
}

function leastCommonMultiple(a: number, b: number): number {
  return (a / greatestCommonDivisor(a, b)) * b;
}
