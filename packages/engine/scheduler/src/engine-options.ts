/** What an engine is made of, and whom it tells. */
import { KvError } from '@kvtier/errors';
import type { Executor } from '@kvtier/executor';
import type { ChainHasher } from '@kvtier/identity';
import type { BlockPolicyName, KvCacheEvent, PackedEvents, PrefixCacheKind, RadixPolicy } from '@kvtier/prefix-cache';
import { type GroupSpec, hasWindows } from './attention-groups.ts';
import type { Connector } from './connector.ts';
import type { Clock, EngineLimits } from './types.ts';

export interface StepInfo {
  readonly sequences: number;
  readonly tokens: number;
  readonly elapsedUs: number;
}

export interface EngineOptions {
  readonly executor: Executor;
  /** Its wake callback should call `wake()`. Closed by its owner, after the engine. */
  readonly connector: Connector;
  readonly hasher: ChainHasher;
  /** End-of-sequence ids. */
  readonly eosTokenIds: readonly number[];
  readonly limits: EngineLimits;
  /** The structure of the engine's own cache: hashed blocks, or a radix tree; default 'blocks'. */
  readonly prefixCache?: PrefixCacheKind;
  /** Which leaf of the radix tree goes first; default 'lru'. */
  readonly radixPolicy?: RadixPolicy;
  /** Of the hashed blocks: which cached block goes first; default: the one freed longest ago. */
  readonly evictionPolicy?: BlockPolicyName | undefined;
  /** Of the hashed blocks: one that fills up with content that is cached already gives way to the cached one; default no. */
  readonly dedupBlocks?: boolean;
  /** Of the hashed blocks: most that pinned prefixes hold, which no request can have then; default 0. */
  readonly maxPinnedBlocks?: number;
  /**
   * Of the hashed blocks: only those go down to the tier that are among the next so many to be reused, or were hit twice.
   * Default: all, as they fill up.
   */
  readonly writeDownAheadBlocks?: number | undefined;
  /** KV events for routers, drained with takeEvents; default off. */
  readonly enableEvents?: boolean;
  /** Takes the KV events instead, after each step and each reset; switches them on. Must neither throw nor wait. */
  readonly onEvents?: (events: readonly KvCacheEvent[]) => void;
  /** The same without an object for each, in place of onEvents; valid during the call. */
  readonly onPackedEvents?: (events: PackedEvents) => void;
  /** Of a hash's bytes, how many of the last ones onPackedEvents is told, if it needs no more; default 32: all. */
  readonly packedHashBytes?: 8 | 32;
  readonly clock?: Clock;
  readonly logger?: { error(details: object, message: string): void; warn(details: object, message: string): void };
  /** After each step, for metrics. */
  readonly onStep?: (info: StepInfo) => void;
  /** What `load` tells may have changed. Must neither throw nor wait. */
  readonly onLoad?: () => void;
  /** A broken invariant or a failed GPU ended the loop: every request has failed and the process should end. */
  readonly onDefect?: (error: Error) => void;
  /** Seeds of requests that bring none. */
  readonly randomSeed?: () => bigint;
}

/** Throws KvError CONFIG: what these options ask for does not go together, or not with these attention groups. */
export function checkOptions(options: EngineOptions, groups: readonly GroupSpec[]): void {
  const isRadix = options.prefixCache === 'radix';
  if (isRadix && hasWindows(groups)) {
    const found = "the model's layers have sliding windows, the radix tree serves full attention alone";
    throw new KvError('CONFIG', `engine: ${found}; set prefixCache (--prefix-cache) to blocks`);
  }
  if (options.writeDownAheadBlocks !== undefined && (isRadix || groups.length > 1)) {
    const found = isRadix ? 'the radix tree' : 'a model whose layers have sliding windows';
    throw new KvError('CONFIG', `engine: ${found} cannot write down ahead of eviction; use writeDown through`);
  }
  if (isRadix && (options.evictionPolicy || options.dedupBlocks || (options.maxPinnedBlocks ?? 0) > 0)) {
    const found = 'eviction policy, de-duplication and pins are options of hashed blocks';
    throw new KvError('CONFIG', `engine: ${found}; set prefixCache (--prefix-cache) to blocks or leave them out`);
  }
}
