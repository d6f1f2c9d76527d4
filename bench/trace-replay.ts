/**
 * A trace's requests through a prefix cache, one after another: look up, allocate, cache, free. Nothing runs a model: what
 * is measured is what the cache finds, and what it costs to keep it.
 */
import { ChainHasher, SequenceHashes } from '@kvtier/identity';
import {
  KvCacheManager,
  type PrefixCache,
  type PrefixCacheKind,
  type PrefixCacheRequest,
  RadixCache,
  type RadixPolicy,
} from '@kvtier/prefix-cache';

/** A request that comes whole and ends at once. */
class ReplayRequest implements PrefixCacheRequest {
  readonly id: string;
  readonly tokens: Int32Array;
  readonly hashes: SequenceHashes;
  readonly extraKey = '';
  readonly running = false;
  computedTokens = 0;

  constructor(id: string, tokens: Int32Array, hashes: SequenceHashes) {
    this.id = id;
    this.tokens = tokens;
    this.hashes = hashes;
  }

  get tokenCount(): number {
    return this.tokens.length;
  }

  tokenIds(first: number, end: number): Int32Array {
    return this.tokens.subarray(first, end);
  }
}

export interface RadixChoice {
  readonly policy?: RadixPolicy;
  /** false: whole nodes go, as in SGLang. */
  readonly trimLeaves?: boolean;
}

export interface CacheShape extends RadixChoice {
  /** Blocks to cache in; the null block comes on top. */
  readonly blocks: number;
  readonly blockTokens: number;
  readonly maxModelTokens: number;
}

export function cacheOf(kind: PrefixCacheKind, { blocks, ...shape }: CacheShape): PrefixCache {
  const options = { blockCount: blocks + 1, ...shape };
  return kind === 'radix' ? new RadixCache(options) : new KvCacheManager(options);
}

/** One request through the cache; tokens that it found, or undefined when the cache is too small for it. */
function serve(cache: PrefixCache, request: ReplayRequest): number | undefined {
  const computed = cache.getComputedBlocks(request);
  const count = request.tokenCount - computed.tokens;
  if (!cache.allocateSlots(request, count, { computed, delayCacheBlocks: true })) return undefined;
  cache.cacheBlocks(request, request.tokenCount - 1);
  cache.free(request.id);
  return computed.tokens;
}

export interface Hits {
  readonly accesses: number;
  readonly hits: number;
  /** Requests that are larger than the cache: they find nothing. */
  readonly tooLarge: number;
}

/**
 * Hits of whole prefixes, one id of the trace as one block. A token more ends each request, which is not cached: what must
 * be computed in any case is not one of the trace's blocks.
 */
export function replayIds(
  kind: PrefixCacheKind,
  requests: readonly Int32Array[],
  blocks: number,
  choice: RadixChoice = {},
): Hits {
  const longest = requests.reduce((most, ids) => Math.max(most, ids.length), 0) + 1;
  const cache = cacheOf(kind, { blocks: blocks + 1, blockTokens: 1, maxModelTokens: longest, ...choice });
  const hasher = new ChainHasher({ algorithm: 'xxhash_cbor', blockTokens: 1 });
  let accesses = 0;
  let hits = 0;
  let tooLarge = 0;
  requests.forEach((ids, i) => {
    const tokens = new Int32Array(ids.length + 1);
    tokens.set(ids);
    tokens[ids.length] = 0x7fff_ffff;
    const hashes = new SequenceHashes(hasher);
    if (kind === 'blocks') hashes.append(new Uint32Array(tokens.buffer));
    const found = serve(cache, new ReplayRequest(`${i}`, tokens, hashes));
    accesses += ids.length;
    hits += found ?? 0;
    if (found === undefined) tooLarge++;
  });
  return { accesses, hits, tooLarge };
}

/** Mean microseconds per request. */
export interface RequestTimes {
  readonly radixUs: number;
  readonly blocksUs: number;
  /** Hashing the chain, which the block pool needs to look up; the tree needs it only with a tier or with events. */
  readonly hashUs: number;
}

/** Both caches serve each request in turn, so that a busy machine disturbs both alike. Tokens made from the trace's ids. */
export function timeRequests(requests: readonly Int32Array[], idTokens: number, shape: CacheShape): RequestTimes {
  const radix = cacheOf('radix', shape);
  const blocks = cacheOf('blocks', shape);
  const hasher = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens: shape.blockTokens });
  let radixMs = 0;
  let blocksMs = 0;
  let hashMs = 0;
  const serveRadix = (request: ReplayRequest): void => {
    const begin = performance.now();
    serve(radix, request);
    radixMs += performance.now() - begin;
  };
  requests.forEach((ids, i) => {
    const tokens = tokensOf(ids, idTokens);
    const hashes = new SequenceHashes(hasher);
    const request = new ReplayRequest(`${i}`, tokens, hashes);
    if (i % 2 === 0) serveRadix(request);
    const begin = performance.now();
    hashes.append(new Uint32Array(tokens.buffer));
    const hashed = performance.now();
    serve(blocks, request);
    blocksMs += performance.now() - hashed;
    hashMs += hashed - begin;
    if (i % 2 === 1) serveRadix(request);
  });
  const perRequest = (elapsedMs: number): number => (elapsedMs * 1000) / requests.length;
  return { radixUs: perRequest(radixMs), blocksUs: perRequest(blocksMs), hashUs: perRequest(hashMs) };
}

/** Equal ids, equal tokens; and one token behind them. */
function tokensOf(ids: Int32Array, idTokens: number): Int32Array {
  const tokens = new Int32Array(ids.length * idTokens + 1);
  ids.forEach((id, block) => {
    let state = Math.imul(id + 1, 0x9e37_79b1) >>> 0;
    for (let i = 0; i < idTokens; i++) {
      state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
      tokens[block * idTokens + i] = (state >>> 8) % 128_000;
    }
  });
  return tokens;
}
