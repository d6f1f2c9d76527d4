/** What the KV-cache manager sees of a request. It reads these and changes none of them. */
import type { HashKey } from '@kvtier/identity';

/**
 * The chain hashes of a request's tokens, one per `hashTokens`; groups with larger blocks use the last one in each. `SequenceHashes` of packages/base/identity is one.
 */
export interface BlockHashes {
  readonly blockCount: number;
  keyAt(block: number): HashKey;
  /** All of them as words, where they lie so: lookups then make no key. Valid until the chain grows. */
  readonly packedWords?: { readonly words: Uint32Array; readonly wordsPerHash: number };
  /**
   * The chain of the same blocks under a cryptographic hash of 32 bytes. A pool that compares content needs them: equal
   * hashes over different tokens or extra keys are then no hit.
   */
  readonly contentDigests?: BlockHashes | undefined;
}

export interface CacheRequest {
  readonly id: string;
  /** Prompt and generated tokens so far. */
  readonly tokenCount: number;
  /** Tokens whose KV is in the request's blocks. */
  readonly computedTokens: number;
  /** In the running batch: admission's watermark does not apply to it any more. */
  readonly running: boolean;
  readonly hashes: BlockHashes;
  /** Tokens of the prompt: where it ends is worth caching in groups that cache sparsely. */
  readonly promptTokens?: number;
  /** Where this request's prefix parts from others that are cached (CacheHit.sharedPrefixBoundary at admission). */
  readonly sharedPrefixBoundary?: number;
  /** Tokens of steps that still run: what they look at is not let go yet. Default 0. */
  readonly inFlightTokens?: number;
  /** 'full': a BlockStored for the blocks of a hit too, so that a consumer that follows this request alone sees all of it. */
  readonly reportMode?: 'full';
  /** Compute everything, e.g. because the caller wants the logits of the prompt. */
  readonly skipReadingPrefixCache?: boolean;
  /** Needed only when events are on. */
  readonly description?: RequestDescription;
}

/** What a BlockStored event says about a request beyond its hashes. */
export interface RequestDescription {
  readonly loraId: number | null;
  readonly loraName: string | null;
  /** No adapter, and no block has extra keys. */
  readonly isPlain?: boolean;
  /** Token ids first..end-1; valid until the request grows. */
  tokenIds(first: number, end: number): ArrayLike<number>;
  /** Those of `count` tokens from `first` on to `target`, from `at` on: as tokenIds, without a view. */
  copyTokens?(first: number, count: number, target: Uint32Array, at: number): void;
  /** What went into the hash of the block of tokens first..end-1 beyond parent and tokens; null when nothing did. */
  extraKeys(first: number, end: number): readonly unknown[] | null;
}
