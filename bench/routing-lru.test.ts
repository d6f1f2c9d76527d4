/** Blocks of one medium in the simulated cluster. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { Lru } from './routing/lru.ts';

it('property: those that nobody uses go, oldest first, and no others', () => {
  const act = fc.tuple(fc.constantFrom('use', 'hold', 'release', 'shrink'), fc.nat(12));
  fc.assert(
    fc.property(fc.array(act, { maxLength: 80 }), (acts) => {
      const lru = new Lru(6);
      /** Users by block, the one used last behind all others. */
      const naive = new Map<number, number>();
      const moves = (block: number, users: number): void => {
        naive.delete(block);
        naive.set(block, users);
      };
      for (const [what, block] of acts) {
        const users = naive.get(block) ?? 0;
        if (what === 'use' || what === 'hold') {
          lru.use(block, what === 'hold' ? 1 : 0);
          moves(block, users + (what === 'hold' ? 1 : 0));
        } else if (what === 'release') {
          lru.release(block);
          if (users > 0) moves(block, users - 1);
        } else {
          const unused = [...naive].filter(([, by]) => by === 0).map(([number]) => number);
          const gone = unused.slice(0, Math.max(naive.size + (block % 4) - 6, 0));
          expect(lru.shrink(block % 4)).toEqual(gone);
          for (const number of gone) naive.delete(number);
        }
        expect(lru.size).toBe(naive.size);
        expect(lru.held).toBe([...naive.values()].filter((by) => by > 0).length);
        expect(lru.has(block)).toBe(naive.has(block));
      }
    }),
  );
});

it('what a use or an eviction costs does not grow with the blocks that are here, used or not', () => {
  const lru = new Lru(20_000);
  for (let block = 0; block < 10_000; block++) lru.use(block, 1);
  for (let block = 10_000; block < 20_000; block++) lru.use(block);
  const before = lru.touched;
  for (let block = 20_000; block < 21_000; block++) {
    lru.use(block);
    lru.use(block - 1_000);
    expect(lru.shrink(0)).toHaveLength(1);
  }
  expect(lru.touched - before).toBeLessThanOrEqual(4 * 1_000);
});
