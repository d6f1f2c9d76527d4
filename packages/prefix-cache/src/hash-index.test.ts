/** HashIndex against a map of lists. */
import type { HashKey } from '@kvtier/identity';
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { HashIndex } from './hash-index.ts';

/** Few homes, so that clusters meet, wrap around the end of the table and part again. */
const keyOf = (number: number): HashKey =>
  `${String.fromCharCode(number)}\0\0${String.fromCharCode(number % 3 === 0 ? 62 + (number % 2) : number % 5)}` as HashKey;

it('equals a map of lists on random operations', () => {
  const operation = fc.record({ add: fc.boolean(), key: fc.nat(60), block: fc.nat(9) });
  fc.assert(
    fc.property(fc.array(operation, { maxLength: 400 }), (operations) => {
      const index = new HashIndex();
      const naive = new Map<number, number[]>();
      for (const { add, key, block } of operations) {
        const held = naive.get(key) ?? [];
        if (add && !held.includes(block)) {
          index.add(keyOf(key), block);
          naive.set(key, [...held, block]);
        } else if (!add && held.includes(block)) {
          index.remove(keyOf(key), block);
          naive.set(
            key,
            held.filter((other) => other !== block),
          );
        }
        expect(index.get(keyOf(key))).toBe(naive.get(key)?.[0]);
      }
      index.checkIntegrity();
      for (const [key, held] of naive) expect(index.get(keyOf(key))).toBe(held[0]);
      expect(index.keyCount).toBe([...naive.values()].filter(({ length }) => length > 0).length);
      expect([...index.entries()].length).toBe([...naive.values()].flat().length);
      index.clear();
      index.checkIntegrity();
      expect(index.keyCount).toBe(0);
    }),
    { numRuns: 300 },
  );
});

it('a removal of what is not there is a defect', () => {
  const index = new HashIndex();
  index.add(keyOf(1), 5);
  expect(() => index.remove(keyOf(1), 6)).toThrow('block 6 is not held under its hash');
  expect(() => index.remove(keyOf(2), 5)).toThrow('block 5 is not held under its hash');
});
