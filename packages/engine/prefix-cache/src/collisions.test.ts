/** Equal hashes over different tokens: with content compared, a miss; each content keeps its own block. */
import { type HashKey, hashKeyOf } from '@kvtier/identity';
import { expect, it } from 'vitest';
import { KvCacheManager, type KvCacheManagerOptions } from './kv-cache-manager.ts';
import type { BlockHashes } from './request.ts';
import { keyOfTokens } from './testing/key-of-tokens.ts';
import { TokenRequest } from './testing/token-request.ts';

/** The hash says how long the prefix is, and nothing else. */
class Colliding extends TokenRequest {
  override get hashes(): BlockHashes {
    const { tokens } = this;
    const blockCount = Math.floor(tokens.length / 2);
    return {
      blockCount,
      keyAt: (block) => hashKeyOf(new Uint8Array(16).fill(block + 1)),
      contentDigests: { blockCount, keyAt: (block) => keyOfTokens(tokens.slice(0, (block + 1) * 2)) },
    };
  }
}

const manager = (options: Partial<KvCacheManagerOptions> = {}): KvCacheManager =>
  new KvCacheManager({ blockCount: 10, blockTokens: 2, maxModelTokens: 40, compareContent: true, ...options });

const cache = (kv: KvCacheManager, id: string, tokens: readonly number[]): Colliding => {
  const request = new Colliding(id, tokens);
  const computed = kv.getComputedBlocks(request);
  kv.allocateSlots(request, tokens.length - computed.tokens, { computed });
  kv.checkIntegrity();
  return request;
};

const hit = (kv: KvCacheManager, tokens: readonly number[]) =>
  kv.getComputedBlocks(new Colliding('lookup', [...tokens, 0])).blocks[0];

it('a collision is a miss, and both contents are found, whichever came first', () => {
  const kv = manager();
  cache(kv, 'a', [1, 1, 2, 2]);
  expect(hit(kv, [1, 1, 2, 2])).toEqual([1, 2]);
  expect(hit(kv, [3, 3, 2, 2])).toEqual([]);
  // Equal tokens behind a prefix that is another one are another content.
  cache(kv, 'b', [3, 3, 2, 2]);
  expect(hit(kv, [3, 3, 2, 2])).toEqual([3, 4]);
  expect(hit(kv, [1, 1, 2, 2])).toEqual([1, 2]);
  expect(hit(kv, [1, 1, 5, 5])).toEqual([1]);
  expect(kv.cachedBlockCount).toBe(4);
});

it('the one that is evicted does not take the other one with it', () => {
  const kv = manager();
  cache(kv, 'a', [1, 1, 2, 2]);
  cache(kv, 'b', [3, 3]);
  kv.free('a');
  kv.free('b');
  kv.evictBlocks([1]);
  kv.checkIntegrity();
  // The second block of a is behind a prefix that is gone: not to be had with b's first block before it.
  expect(hit(kv, [3, 3, 2, 2])).toEqual([3]);
  expect(hit(kv, [1, 1, 2, 2])).toEqual([]);
});

it('windows compare what they do not look at, too', () => {
  const groups = [{ kind: 'sliding_window', blockTokens: 2, windowTokens: 3 } as const];
  const kv = manager({ groups });
  cache(kv, 'a', [1, 1, 2, 2, 4, 4]);
  expect(hit(kv, [1, 1, 2, 2, 4, 4])).toEqual([0, 0, 3]);
  expect(hit(kv, [9, 9, 2, 2, 4, 4])).toEqual([]);
});

it('de-duplication takes equal content only', () => {
  const kv = manager({ dedupBlocks: true });
  const fill = (id: string, tokens: readonly number[]): readonly number[] => {
    const request = new Colliding(id, tokens);
    kv.allocateSlots(request, tokens.length, { delayCacheBlocks: true });
    kv.cacheBlocks(request, tokens.length);
    kv.checkIntegrity();
    return kv.blockTables(id)[0]!;
  };
  expect(fill('a', [1, 1, 2, 2])).toEqual([1, 2]);
  expect(fill('b', [1, 1, 3, 3])).toEqual([1, 4]);
  expect(kv.snapshot().refs).toEqual(
    new Map([
      [1, 2],
      [2, 1],
      [4, 1],
    ]),
  ); // prettier-ignore
});

it('copies and interior hashes keep their digests', () => {
  const groups = [{ kind: 'full_attention', blockTokens: 4 } as const];
  const hashTokens = 2;
  const kv = manager({
    groups: [...groups, { kind: 'mamba', blockTokens: 4, mode: 'align', speculativeBlocks: 0 }],
    hashTokens,
  });
  const request = new Colliding('a', [1, 1, 2]);
  kv.allocateSlots(request, 2);
  kv.newStepStarts();
  request.running = true;
  request.computedTokens = 2;
  expect(kv.getComputedBlocks(new Colliding('b', [1, 1, 7])).tokens).toBe(2);
  expect(kv.getComputedBlocks(new Colliding('b', [3, 3, 7])).tokens).toBe(0);
  request.tokens.push(2, 5);
  kv.allocateSlots(request, 3); // its state moves on: the hash goes to a copy
  kv.newStepStarts();
  kv.checkIntegrity();
  expect(kv.getComputedBlocks(new Colliding('b', [1, 1, 7])).tokens).toBe(2);
  expect(kv.getComputedBlocks(new Colliding('b', [3, 3, 7])).tokens).toBe(0);
});

it('without the comparison the first one answers: what a cryptographic hash rules out', () => {
  const kv = manager({ compareContent: false });
  cache(kv, 'a', [1, 1, 2, 2]);
  expect(hit(kv, [3, 3, 2, 2])).toEqual([1, 2]);
});

it('a request without digests is a defect of its owner', () => {
  const kv = manager();
  expect(() => kv.getComputedBlocks(new TokenRequest('a', [1, 1, 2]))).toThrow('the request has no digests of it');
  const short: BlockHashes = { blockCount: 1, keyAt: () => 'x'.repeat(16) as HashKey };
  const request = { id: 'b', tokenCount: 3, computedTokens: 0, running: false };
  const hashes = { ...short, contentDigests: short };
  expect(() => kv.getComputedBlocks({ ...request, hashes })).toThrow('a digest of 16 bytes');
});
