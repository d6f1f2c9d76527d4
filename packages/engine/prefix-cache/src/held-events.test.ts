/** What a cache holds, told anew: of each group the same as in the events that told it first. */
import { expect, it } from 'vitest';
import type { AttentionSpec } from './attention-spec.ts';
import type { KvCacheEvent } from './events.ts';
import { KvCacheManager } from './kv-cache-manager.ts';
import { RadixCache } from './radix/radix-cache.ts';
import { TokenRequest } from './testing/token-request.ts';

/** Group, kind and window of each event that stores. */
const groupsOf = (events: readonly KvCacheEvent[]): string[] => [
  ...new Set(
    events.flatMap((event) =>
      event.type === 'BlockStored'
        ? [`${event.groupIdx} ${event.kvCacheSpecKind} ${event.kvCacheSpecSlidingWindow}`]
        : [],
    ),
  ),
];

it('kind and window of each attention group are said with what is held', () => {
  const options = { blockCount: 30, blockTokens: 2, maxModelTokens: 40, enableEvents: true };
  const groups: AttentionSpec[] = [
    { kind: 'full_attention', blockTokens: 2 },
    { kind: 'sliding_window', blockTokens: 2, windowTokens: 5 },
  ];
  const request = Object.assign(new TokenRequest('r', [1, 2, 3, 4, 5, 6, 7, 8]), {
    extraKey: '',
    tokenIds: (first: number, end: number) => Int32Array.from([1, 2, 3, 4, 5, 6, 7, 8].slice(first, end)),
  });
  const said = [new KvCacheManager({ ...options, groups }), new RadixCache(options)].map((cache) => {
    expect(cache.allocateSlots(request, 8)).not.toBeNull();
    cache.cacheBlocks(request, 8);
    return [cache.takeEvents(), [...cache.heldEvents()].flat()].map(groupsOf);
  });
  const [full, window] = ['0 full_attention null', '1 sliding_window 5'];
  expect(said).toEqual([
    [
      [full, window],
      [full, window],
    ],
    [[full], [full]],
  ]);
});
