/** Blocks of a request that are full, as the pool is told of them and as it tells of them. */
import type { StoredRun } from './events.ts';
import type { CacheRequest } from './request.ts';

/** Logical blocks `first`..`end`-1 of a request are now full: make them findable. */
export interface FullBlocks {
  readonly request: CacheRequest;
  /** The request's block table. */
  readonly table: readonly number[];
  readonly first: number;
  readonly end: number;
  readonly blockTokens: number;
  /** Tokens per hash; divides blockTokens. A block's hash is the last one inside it. */
  readonly hashTokens: number;
  readonly group: number;
  /** For the event: "full_attention" and the like. */
  readonly kind: string;
  /** For the event: a sliding window's size. */
  readonly windowTokens: number | null;
  /** Which of the blocks are worth it; undefined: all. */
  readonly keep: ((i: number) => boolean) | undefined;
}

/** Blocks at these places of the request are stored, ascending. */
export function runOf(full: FullBlocks, blocks: number[]): StoredRun {
  const { request, first, end, blockTokens, group, kind, windowTokens } = full;
  const { hashes, description } = request;
  const hashesPerBlock = blockTokens / full.hashTokens;
  const places = hashesPerBlock === 1 ? blocks : blocks.map((i) => (i + 1) * hashesPerBlock - 1);
  const parent = first === 0 ? -1 : first * hashesPerBlock - 1;
  return { hashes, description, places, parent, blocks, first, end, blockTokens, group, kind, windowTokens };
}
