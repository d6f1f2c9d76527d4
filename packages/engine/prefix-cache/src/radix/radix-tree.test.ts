import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { type RadixPolicy, radixPolicies } from './eviction-queue.ts';
import type { RadixNode } from './radix-node.ts';
import { RadixTree } from './radix-tree.ts';
import { NaivePrefixes } from './testing/naive-prefixes.ts';

const ids = (...tokens: number[]): Int32Array => Int32Array.from(tokens);
const treeOf = (policy: RadixPolicy = 'lru', pageTokens = 1): RadixTree =>
  new RadixTree({ pageTokens, pageLimit: 1000, policy });
const evictAll = (tree: RadixTree, count: number): number[][] => {
  const gone: number[][] = [];
  tree.evict(count, (pages) => gone.push([...pages]));
  return gone;
};

describe('a radix tree', () => {
  it('finds the longest prefix to the token, and splits where it ends', () => {
    const tree = treeOf();
    tree.insert(ids(1, 2, 3, 4), [10, 11, 12, 13]);
    const { node, pageCount } = tree.match(ids(1, 2, 3, 9));
    expect(pageCount).toBe(3);
    expect(tree.pathPages(node!)).toEqual([10, 11, 12]);
    expect(node).toMatchObject({ endPages: 3, pageCount: 3 });
    expect([...tree.leaves()].map((leaf) => tree.pathPages(leaf.node))).toEqual([[10, 11, 12, 13]]);
    expect(tree.match(ids(2, 3))).toEqual({ node: undefined, pageCount: 0 });
    tree.checkIntegrity();
  });

  it('keeps its own pages of what is there already', () => {
    const tree = treeOf();
    tree.insert(ids(1, 2, 3), [10, 11, 12]);
    const { node, duplicatePages } = tree.insert(ids(1, 2, 7, 8), [20, 21, 22, 23]);
    expect(duplicatePages).toBe(2);
    expect(tree.pathPages(node!)).toEqual([10, 11, 22, 23]);
    expect(tree.pageCount).toBe(5);
    tree.checkIntegrity();
  });

  it('shares whole pages only, and tells pages apart that begin alike', () => {
    const tree = treeOf('lru', 4);
    tree.insert(ids(1, 2, 3, 4, 5, 6, 7, 8, 9), [10, 11]);
    tree.insert(ids(1, 2, 3, 9), [12]);
    expect(tree.match(ids(1, 2, 3, 4, 5, 6, 7, 9)).pageCount).toBe(1);
    expect(tree.pathPages(tree.match(ids(1, 2, 3, 9, 0)).node!)).toEqual([12]);
    expect(tree.match(ids(1, 2, 3)).pageCount).toBe(0);
    expect(tree.match(ids(1, 2, 3 + 65_536, 4)).pageCount).toBe(0);
    tree.checkIntegrity();
  });

  it('shares nothing across extra keys', () => {
    const tree = treeOf();
    tree.insert(ids(1, 2), [10, 11], { extraKey: 'tenant' });
    expect(tree.match(ids(1, 2)).pageCount).toBe(0);
    expect(tree.match(ids(1, 2), 'tenant').pageCount).toBe(2);
    expect(evictAll(tree, 2)).toEqual([[10, 11]]);
    expect(tree.match(ids(1, 2), 'tenant').pageCount).toBe(0);
    tree.checkIntegrity();
  });

  it('keeps a locked node and all above it, and evicts from the leaves', () => {
    const tree = treeOf();
    tree.insert(ids(1, 2), [10, 11]);
    const { node } = tree.insert(ids(1, 2, 3), [20, 21, 22]);
    tree.insert(ids(1, 2, 4, 5), [30, 31, 32, 33]);
    tree.lock(node!);
    expect([tree.evictablePages, tree.protectedPages]).toEqual([2, 3]);
    expect(evictAll(tree, 100)).toEqual([[32, 33]]);
    expect(tree.reset()).toBe(false);
    tree.unlock(node!);
    expect([tree.evictablePages, tree.protectedPages]).toEqual([3, 0]);
    tree.checkIntegrity();
    expect(evictAll(tree, 2)).toEqual([[22], [10, 11]]);
    expect(tree.pageCount).toBe(0);
    tree.checkIntegrity();
  });

  it('keeps a lock when the node is split', () => {
    const tree = treeOf();
    const { node } = tree.insert(ids(1, 2, 3), [10, 11, 12]);
    tree.lock(node!);
    const upper = tree.match(ids(1)).node!;
    expect(upper.lockRefs).toBe(1);
    expect(tree.protectedPages).toBe(3);
    tree.unlock(node!);
    expect(tree.protectedPages).toBe(0);
    expect(() => tree.unlock(node!)).toThrow('more often than locked');
  });

  it('grows the leaf of its only holder in place, and of nobody else', () => {
    const tree = treeOf();
    const { node } = tree.insert(ids(1), [10]);
    tree.lock(node!);
    tree.hold(node!);
    for (let i = 0; i < 100; i++) {
      expect(tree.insert(ids(i), [100 + i], { after: node }).node).toBe(node);
    }
    expect(node).toMatchObject({ pageCount: 101, endPages: 101 });
    tree.checkIntegrity();
    tree.lock(node!); // somebody else, who relies on the end
    const longer = tree.insert(ids(5), [300], { after: node }).node!;
    expect(longer).not.toBe(node);
    expect(tree.pathPages(longer).slice(-2)).toEqual([199, 300]);
    tree.unlock(node!);
    tree.release(node!);
    tree.unlock(node!);
    expect(tree.protectedPages).toBe(0);
    tree.checkIntegrity();
  });

  it.each<[RadixPolicy, number[][]]>([
    ['lru', [[12], [10], [11]]],
    ['mru', [[11], [10], [12]]],
    ['fifo', [[10], [11], [12]]],
    ['filo', [[12], [11], [10]]],
    ['lfu', [[12], [11], [10]]],
    ['priority', [[11], [12], [10]]],
  ])('evicts by %s', (policy, order) => {
    const tree = treeOf(policy);
    tree.insert(ids(0), [10], { priority: 5 });
    tree.insert(ids(1), [11]);
    tree.insert(ids(2), [12], { priority: 2 });
    tree.insert(ids(0), [20]);
    tree.insert(ids(0), [21]);
    tree.match(ids(1));
    tree.recordHit(tree.match(ids(1)).node!);
    expect(evictAll(tree, 3)).toEqual(order);
  });

  it('trims a leaf when asked to, and no more than needed', () => {
    const tree = new RadixTree({ pageTokens: 1, pageLimit: 100, trimLeaves: true });
    tree.insert(ids(1, 2, 3, 4), [10, 11, 12, 13]);
    tree.insert(ids(5), [20]);
    expect(evictAll(tree, 3)).toEqual([[11, 12, 13]]);
    expect(tree.match(ids(1, 2)).pageCount).toBe(1);
    tree.checkIntegrity();
    expect(evictAll(tree, 3)).toEqual([[20], [10]]);
    tree.checkIntegrity();
  });

  it('holds no more queue entries than it needs, however often leaves are used', () => {
    const tree = treeOf();
    for (let i = 0; i < 10; i++) tree.insert(ids(i), [i]);
    for (let i = 0; i < 10_000; i++) tree.match(ids(i % 7));
    tree.checkIntegrity();
    expect(evictAll(tree, 3)).toEqual([[7], [8], [9]]);
  });
});

const sequence = fc.record({
  // Few different tokens, so that sequences share prefixes.
  tokens: fc.array(fc.nat({ max: 2 }), { maxLength: 14, size: 'max' }),
  extraKey: fc.constantFrom('', '', 'a'),
});
const operation = fc.oneof(
  fc.record({ type: fc.constant('match' as const), sequence }),
  fc.record({ type: fc.constant('insert' as const), sequence, priority: fc.nat({ max: 2 }) }),
  fc.record({ type: fc.constant('lock' as const), sequence }),
  fc.record({
    type: fc.constant('grow' as const),
    which: fc.nat(),
    tokens: fc.array(fc.nat({ max: 2 }), { maxLength: 6, size: 'max' }),
  }),
  fc.record({ type: fc.constant('unlock' as const), which: fc.nat() }),
  fc.record({ type: fc.constant('evict' as const), pages: fc.integer({ min: 1, max: 6 }) }),
);

it('does what the naive prefixes do, on random schedules', () => {
  fc.assert(
    fc.property(
      fc.constantFrom(...radixPolicies),
      fc.integer({ min: 1, max: 3 }),
      fc.boolean(),
      fc.array(operation, { maxLength: 40, size: 'max' }),
      (policy, pageTokens, trimLeaves, operations) => {
        const tree = new RadixTree({ pageTokens, pageLimit: 1000, policy, trimLeaves });
        const naive = new NaivePrefixes(pageTokens, policy, trimLeaves);
        const locks: { node: RadixNode; tokens: number[]; extraKey: string }[] = [];
        let nextPage = 0;
        const fresh = (tokens: readonly number[]): number[] =>
          Array.from({ length: Math.floor(tokens.length / pageTokens) }, () => nextPage++);
        const match = (tokens: readonly number[], extraKey: string): RadixNode | undefined => {
          const { node, pageCount } = tree.match(ids(...tokens), extraKey);
          const pages = naive.match(tokens, extraKey);
          expect(pageCount).toBe(pages.length);
          expect(node ? tree.pathPages(node) : []).toEqual(pages);
          return node;
        };
        for (const one of operations) {
          if (one.type === 'match') match(one.sequence.tokens, one.sequence.extraKey);
          else if (one.type === 'insert') {
            const { tokens, extraKey } = one.sequence;
            const pages = fresh(tokens);
            if (pages.length === 0) continue;
            const { duplicatePages } = tree.insert(ids(...tokens), pages, { extraKey, priority: one.priority });
            expect(duplicatePages).toBe(naive.insert(tokens, pages, extraKey, one.priority));
          } else if (one.type === 'lock') {
            const { tokens, extraKey } = one.sequence;
            const node = match(tokens, extraKey);
            if (!node) continue;
            const held = tokens.slice(0, node.endPages * pageTokens);
            tree.lock(node);
            naive.lock(held, node.endPages, extraKey);
            locks.push({ node, tokens: held, extraKey });
          } else if (one.type === 'evict') expect(evictAll(tree, one.pages)).toEqual(naive.evict(one.pages));
          else if (locks.length > 0) {
            const lock = locks[one.which % locks.length]!;
            const { node, tokens, extraKey } = lock;
            if (one.type === 'unlock') {
              tree.unlock(node);
              naive.lock(tokens, node.endPages, extraKey, 0, -1);
              locks.splice(locks.indexOf(lock), 1);
              continue;
            }
            const added = one.tokens.slice(0, Math.floor(one.tokens.length / pageTokens) * pageTokens);
            const pages = fresh(added);
            if (pages.length === 0) continue;
            const from = node.endPages;
            const longer = [...tokens, ...added];
            const inserted = tree.insert(ids(...added), pages, { extraKey, after: node });
            expect(inserted.duplicatePages).toBe(naive.insert(longer, pages, extraKey, 0, from));
            if (inserted.node !== node) {
              tree.lock(inserted.node!);
              naive.lock(longer, inserted.node!.endPages, extraKey);
              tree.unlock(node);
              naive.lock(tokens, from, extraKey, 0, -1);
            }
            Object.assign(lock, { node: inserted.node!, tokens: longer });
          }
          tree.checkIntegrity();
          expect({ evictable: tree.evictablePages, locked: tree.protectedPages }).toEqual(naive.counts);
        }
      },
    ),
    { numRuns: Number(process.env.KVTIER_PROPERTY_RUNS ?? 1000) },
  );
}, 600_000);
