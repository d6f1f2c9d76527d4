/**
 * What kind of attention a group of layers has, and in what units its blocks are cut. One spec per group; groups with
 * equal specs are looked up together. After vLLM's KVCacheSpec and its subclasses.
 */
import { KvError } from '@kvtier/errors';

interface BlockSpec {
  /** Tokens per block on one rank; with context parallelism a block of attention spans that many tokens on each. */
  readonly blockTokens: number;
}

export interface FullAttentionSpec extends BlockSpec {
  readonly kind: 'full_attention' | 'mla_attention';
}

export interface SlidingWindowSpec extends BlockSpec {
  readonly kind: 'sliding_window';
  /** Tokens that a token sees, itself included. */
  readonly windowTokens: number;
}

export interface ChunkedLocalSpec extends BlockSpec {
  readonly kind: 'chunked_local_attention';
  readonly chunkTokens: number;
}

export interface MambaSpec extends BlockSpec {
  readonly kind: 'mamba';
  /** none: one running state; all: a state per block; align: states only where a scheduling step ended. */
  readonly mode: 'none' | 'all' | 'align';
  /** States kept for tokens that may be rejected. */
  readonly speculativeBlocks: number;
}

export interface CrossAttentionSpec extends BlockSpec {
  readonly kind: 'cross_attention';
}

export interface SinkAttentionSpec extends BlockSpec {
  readonly kind: 'sink_full_attention';
  /** Tokens that every request sees, in blocks that are taken once. */
  readonly sinkTokens: number;
}

/** Full attention over the prompt, a window over what is generated. */
export interface RswaSpec extends BlockSpec {
  readonly kind: 'rswa';
  /** Generated tokens that a token sees. */
  readonly windowTokens: number;
}

export type AttentionSpec =
  | FullAttentionSpec
  | SlidingWindowSpec
  | ChunkedLocalSpec
  | MambaSpec
  | CrossAttentionSpec
  | SinkAttentionSpec
  | RswaSpec;

const wholePrefixKinds: ReadonlySet<string> = new Set([
  'full_attention',
  'mla_attention',
  'sink_full_attention',
  'rswa',
]);

/** Sees every token before it (of the prompt, at least): a hit is an unbroken run of blocks, and every prefix of a hit is a hit. */
export function seesWholePrefix(spec: AttentionSpec): boolean {
  return wholePrefixKinds.has(spec.kind);
}

/** Equal specs, equal text. */
export function specKey(spec: AttentionSpec): string {
  return JSON.stringify(Object.entries(spec).sort(([a], [b]) => (a < b ? -1 : 1)));
}

/** Tokens that one block of this group covers: `contextParallel` ranks share the blocks of attention, not states. */
export function tokensPerBlock(spec: AttentionSpec, contextParallel: number): number {
  return spec.kind === 'mamba' ? spec.blockTokens : spec.blockTokens * contextParallel;
}

/** Throws KvError CONFIG for a spec that cannot work. */
export function checkSpec(spec: AttentionSpec, group: number): void {
  for (const [name, value] of Object.entries(spec)) {
    if (typeof value !== 'number') continue;
    const least = name === 'speculativeBlocks' || name === 'sinkTokens' ? 0 : 1;
    if (!Number.isInteger(value) || value < least)
      throw new KvError(
        'CONFIG',
        `attention group ${group}: ${name} ${value}; give a whole number of at least ${least}`,
      );
  }
  if (spec.kind === 'sink_full_attention' && spec.sinkTokens % spec.blockTokens !== 0)
    throw new KvError('CONFIG', `attention group ${group}: sinkTokens must be a multiple of blockTokens`);
}
