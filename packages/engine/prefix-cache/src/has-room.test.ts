/** Growing inside the last block is passed over without a look at the rest: what comes of it is the same. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { KvCacheManager } from './index.ts';
import { TokenRequest } from './testing/token-request.ts';

it('tables, free blocks and refusals are those of a manager that looks at everything', () => {
  const action = fc.record({
    which: fc.nat(2),
    tokens: fc.integer({ min: 1, max: 7 }),
    lookahead: fc.nat(3),
    leaves: fc.integer({ min: 0, max: 9 }).map((n) => n === 0),
  });
  const options = { blockCount: 9, blockTokens: 4, hashTokens: 4, maxModelTokens: 24, watermark: 0.2 };
  fc.assert(
    fc.property(fc.array(action, { maxLength: 60 }), (actions) => {
      const [quick, whole] = [new KvCacheManager(options), new KvCacheManager(options)];
      const requests = [0, 1, 2].map((id) => new TokenRequest(`r${id}`, [id], 4));
      for (const { which, tokens, lookahead, leaves } of actions) {
        const request = requests[which]!;
        if (leaves) {
          for (const kv of [quick, whole]) kv.free(request.id);
          requests[which] = new TokenRequest(request.id, [which], 4);
          continue;
        }
        const count = Math.min(tokens, 24 - request.computedTokens);
        if (count === 0) continue;
        while (request.tokenCount < request.computedTokens + count)
          request.tokens.push(100 * which + request.tokenCount);
        const grow = { delayCacheBlocks: true, lookaheadTokens: lookahead };
        const added = quick.allocateSlots(request, count, grow);
        // A hit of nothing, named, takes the long way.
        expect(added).toEqual(whole.allocateSlots(request, count, { ...grow, computed: noHit }));
        if (added === null) continue;
        request.running = true;
        request.computedTokens += count;
        for (const kv of [quick, whole]) kv.cacheBlocks(request, request.computedTokens);
        expect(quick.blockTables(request.id)).toEqual(whole.blockTables(request.id));
        expect(quick.snapshot().free).toEqual(whole.snapshot().free);
        expect(quick.cachedBlockCount).toBe(whole.cachedBlockCount);
      }
    }),
    { numRuns: 300 },
  );
});

const noHit = { blocks: [[]], tokens: 0, sharedPrefixBoundary: 0 };
