/** What a coordinator wants brought in ahead: asked of the node by its hashes, bounded, and called off in time. */
import { ChainHasher, SequenceHashes } from '@kvtier/identity';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { PrefixPrefetches } from './prefix-prefetches.ts';

const hasher = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens: 4 });
const tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9];

class Node {
  attached = true;
  readonly asked: { id: string; hashes: string; first: number }[] = [];
  readonly forgotten: string[] = [];
  prefetch = (id: string, hashes: Buffer, first: number): void => {
    this.asked.push({ id, hashes: hashes.toString('hex'), first });
  };
  forget = (id: string): void => {
    this.forgotten.push(id);
  };
}

const made = (node: Node): PrefixPrefetches =>
  new PrefixPrefetches({ connector: node, hasher, vocabSize: 100, maxTokens: 64, maxOpen: 2 });
const asked = (part: object = {}) => ({ promptTokenIds: tokens, cacheSalt: '', deadlineMs: 1_000, ...part });

beforeEach(() => {
  vi.useFakeTimers();
});
afterEach(() => {
  vi.useRealTimers();
});

it('asks the node for the whole blocks, by the names that a request would have', () => {
  const node = new Node();
  const prefetches = made(node);
  expect([prefetches.begin(asked()), prefetches.begin(asked({ cacheSalt: 's' }))]).toEqual([2, 2]);
  const expected = ['', 's'].map((cacheSalt) => {
    const hashes = new SequenceHashes(hasher, cacheSalt ? { cacheSalt } : {});
    hashes.append(Uint32Array.from(tokens));
    return hashes.packed.toString('hex');
  });
  expect(node.asked.map(({ hashes, first }) => [hashes, first])).toEqual(expected.map((hashes) => [hashes, 0]));
});

it('calls each off at its deadline, and all at the end', () => {
  const node = new Node();
  const prefetches = made(node);
  prefetches.begin(asked());
  prefetches.begin(asked({ deadlineMs: 2_000 }));
  vi.advanceTimersByTime(1_000);
  expect(node.forgotten).toEqual([node.asked[0]!.id]);
  prefetches.close();
  expect(node.forgotten).toEqual(node.asked.map(({ id }) => id));
  expect(prefetches.open).toBe(0);
});

it('refuses what is too much or cannot be, and asks nobody where there is no node', () => {
  const node = new Node();
  const prefetches = made(node);
  const codeOf = (part: object): unknown => {
    try {
      return prefetches.begin(asked(part));
    } catch (error) {
      return (error as { code: string }).code;
    }
  };
  const long = Array.from({ length: 65 }, () => 1);
  expect([{ promptTokenIds: long }, { promptTokenIds: [100] }, { deadlineMs: 0 }].map(codeOf)).toEqual([
    'REQUEST',
    'REQUEST',
    'REQUEST',
  ]);
  expect([{ promptTokenIds: [1, 2, 3] }, {}].map(codeOf)).toEqual([0, 2]);
  node.attached = false;
  expect(codeOf({})).toBe(0);
  expect(node.asked.length).toBe(1);
});

it('of too many the oldest gives way, and no other, nor to what asks the node for nothing', () => {
  const node = new Node();
  const prefetches = made(node);
  for (let i = 0; i < 4; i++) expect(prefetches.begin(asked({ cacheSalt: `${i}` }))).toBe(2);
  expect(prefetches.begin(asked({ promptTokenIds: [1, 2, 3] }))).toBe(0);
  const names = node.asked.map(({ id }) => id);
  expect([names.length, node.forgotten, prefetches.open]).toEqual([4, names.slice(0, 2), 2]);
  vi.advanceTimersByTime(1_000);
  expect([node.forgotten, prefetches.open]).toEqual([names, 0]);
});
