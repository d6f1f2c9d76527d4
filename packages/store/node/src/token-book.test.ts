import { hashKeyOf, namespaceFromDigest } from '@kvtier/identity';
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { entryBytes, TokenBook } from './token-book.ts';

const namespaces = [1, 2].map((fill) => namespaceFromDigest(Buffer.alloc(32, fill)));
const hashOf = (n: number) => hashKeyOf(Buffer.alloc(16, n));
const packed = (tokens: readonly number[]): Buffer => Buffer.from(Uint32Array.from(tokens).buffer);

it('tokens are kept as they are, with what precedes them, each namespace by itself', () => {
  const book = new TokenBook(1 << 20);
  book.learn(namespaces[0]!, hashOf(1), null, packed([0, 255, 256, 2 ** 32 - 1]));
  book.learn(namespaces[0]!, hashOf(2), hashOf(1), packed([7, 8, 9, 10]));
  expect(book.of(namespaces[0]!, hashOf(1))).toEqual({
    parent: null,
    tokenIds: Uint32Array.from([0, 255, 256, 2 ** 32 - 1]),
  });
  expect(book.of(namespaces[0]!, hashOf(2))!.parent).toBe(hashOf(1));
  expect(book.of(namespaces[1]!, hashOf(1))).toBeUndefined();
});

it('a random life: the youngest that fit are kept, and nothing else', () => {
  const most = 5;
  const blockTokens = 4;
  const step = fc.record({ space: fc.nat(1), hash: fc.nat(9), parent: fc.nat(9), token: fc.nat() });
  fc.assert(
    fc.property(fc.array(step, { maxLength: 60 }), (life) => {
      const book = new TokenBook(most * (entryBytes + 4 * blockTokens) + 10);
      const order: string[] = [];
      const truth = new Map<string, { parent: number; token: number }>();
      for (const { space, hash, parent, token } of life) {
        book.learn(namespaces[space]!, hashOf(hash), hashOf(parent), packed(Array(blockTokens).fill(token)));
        const name = `${space} ${hash}`;
        if (order.includes(name)) order.splice(order.indexOf(name), 1);
        order.push(name);
        truth.set(name, { parent, token });
        const kept = order.slice(-most);
        const { blocks, bytes } = book.stats();
        expect(blocks).toBe(kept.length);
        expect(bytes).toBe(kept.length * (entryBytes + 4 * blockTokens));
        for (const one of order) {
          const [from, which] = one.split(' ').map(Number) as [number, number];
          const known = book.of(namespaces[from]!, hashOf(which));
          expect(known !== undefined, one).toBe(kept.includes(one));
          if (known === undefined) continue;
          expect(known.parent).toBe(hashOf(truth.get(one)!.parent));
          expect([...known.tokenIds]).toEqual(Array(blockTokens).fill(truth.get(one)!.token));
        }
      }
    }),
    { numRuns: 200 },
  );
});

it('a bound below one block keeps none', () => {
  const book = new TokenBook(100);
  book.learn(namespaces[0]!, hashOf(1), null, packed([1]));
  expect(book.stats()).toEqual({ blocks: 0, bytes: 0, dropped: 1 });
});

it('a bound of blocks keeps so many, however little they take', () => {
  const book = new TokenBook(2 ** 40, 2);
  for (const n of [1, 2, 3]) book.learn(namespaces[0]!, hashOf(n), null, packed([n]));
  expect(book.stats()).toEqual({ blocks: 2, bytes: 2 * (entryBytes + 4), dropped: 1 });
  expect([1, 2, 3].map((n) => book.of(namespaces[0]!, hashOf(n))?.tokenIds[0])).toEqual([undefined, 2, 3]);
});
