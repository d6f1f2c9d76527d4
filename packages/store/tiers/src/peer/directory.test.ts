/** Who holds what, of as many peers as a node may have: against a model, and what it costs in memory. */
import type { HashKey, Namespace } from '@kvtier/identity';
import { expect, it } from 'vitest';
import { slicing } from '../kit/slices.ts';
import { hashNamed, namespaceNamed } from '../kit/testing/objects.ts';
import { bitOf, bitsOf, maxPeers, PeerDirectory } from './directory.ts';

const spaces = [namespaceNamed('one'), namespaceNamed('two')];
const hashes = Array.from({ length: 200 }, (_, i) => hashNamed(i));

/** The same as sets: by block, "peer.tier". */
class Model {
  readonly held = new Map<string, Set<string>>();

  of({ key }: Namespace, hash: HashKey): Set<string> {
    return this.held.get(key + hash) ?? this.held.set(key + hash, new Set()).get(key + hash)!;
  }

  holders(namespace: Namespace, hash: HashKey): number[] {
    const peers = new Set([...this.of(namespace, hash)].map((each) => Number(each.split('.')[0])));
    return [...peers].sort((a, b) => a - b);
  }
}

const holdersIn = (directory: PeerDirectory, namespace: Namespace, hash: HashKey): number[] => {
  const found = directory.holders(namespace, hash);
  return Array.from({ length: maxPeers }, (_, peer) => peer).filter((peer) => found.has(bitsOf(peer)));
};

it('a node may have 64 peers', () => {
  expect(maxPeers).toBe(64);
});

it.each([18, 64])('%i peers: each is known by what it holds, whoever comes and goes', (peers) => {
  const directory = new PeerDirectory(10_000);
  const model = new Model();
  let seed = peers;
  const below = (limit: number): number => {
    seed = (Math.imul(seed, 1_103_515_245) + 12_345) >>> 0;
    return Math.floor(((seed >>> 8) / 2 ** 24) * limit);
  };
  const agree = (): void => {
    directory.checkIntegrity();
    let count = 0;
    for (const namespace of spaces) {
      for (const hash of hashes) {
        const wanted = model.holders(namespace, hash);
        if (wanted.length > 0) count++;
        expect(holdersIn(directory, namespace, hash)).toEqual(wanted);
        expect(directory.lookup(namespace, [hash])).toBe(wanted.length > 0 ? 1 : 0);
      }
    }
    expect(directory.count).toBe(count);
    const listed = [...directory.all()].reduce((sum, [, page]) => sum + page.length, 0);
    expect(listed).toBe(count);
  };
  for (let step = 0; step < 3_000; step++) {
    const namespace = spaces[below(2)]!;
    const from = below(hashes.length);
    const some = hashes.slice(from, from + 1 + below(20));
    const [peer, tier] = [below(peers), below(2) as 0 | 1];
    const what = below(100);
    if (what < 60) {
      const fresh = some.filter((hash) => model.of(namespace, hash).size === 0);
      expect(directory.add(namespace, some, bitOf(peer, tier))).toEqual(fresh);
      for (const hash of some) model.of(namespace, hash).add(`${peer}.${tier}`);
    } else if (what < 90) {
      const held = some.filter((hash) => model.of(namespace, hash).size > 0);
      for (const hash of some) model.of(namespace, hash).delete(`${peer}.${tier}`);
      const gone = held.filter((hash) => model.of(namespace, hash).size === 0);
      expect(directory.remove(namespace, some, bitOf(peer, tier))).toEqual(gone);
    } else if (what < 92) {
      const held = some.filter((hash) => model.of(namespace, hash).size > 0);
      for (const hash of some) model.of(namespace, hash).clear();
      expect(directory.remove(namespace, some)).toEqual(held);
    } else if (what < 94) {
      const next = directory.drop(bitsOf(peer));
      for (const held of model.held.values()) for (const at of [0, 1]) held.delete(`${peer}.${at}`);
      // It holds nothing at once, and its entries go after that.
      for (const hash of some) expect(holdersIn(directory, namespace, hash)).toEqual(model.holders(namespace, hash));
      while (next() !== undefined);
    }
    if (step % 300 === 0) agree();
  }
  agree();
  directory.dropAll();
  model.held.clear();
  agree();
});

it('what one peer alone held is told when it goes, slice by slice; what others hold stays theirs', () => {
  const directory = new PeerDirectory(10_000);
  const many = Array.from({ length: 3 * slicing.blocks }, (_, i) => hashNamed(`many ${i}`));
  const shared = many.slice(0, slicing.blocks);
  directory.add(spaces[0]!, many, bitOf(63, 0));
  directory.add(spaces[0]!, shared, bitOf(2, 1));
  const next = directory.drop(bitsOf(63));
  expect(directory.holds(spaces[0]!, many[0]!, bitsOf(63))).toBe(false);
  const gone: HashKey[] = [];
  for (let pages = next(); pages !== undefined; pages = next())
    for (const [, page] of pages) {
      expect(page.length).toBeLessThanOrEqual(slicing.blocks);
      gone.push(...page);
    }
  expect(gone.sort()).toEqual(many.slice(slicing.blocks).sort());
  expect(directory.count).toBe(shared.length);
  expect(directory.holds(spaces[0]!, shared[0]!, bitOf(2, 1))).toBe(true);
  directory.checkIntegrity();
});

it('each 16 peers beyond the first ones cost 4 bytes a block, once they hold something', () => {
  const many = Array.from({ length: 20_000 }, (_, i) => hashNamed(i));
  const bytesWith = (...peers: readonly number[]): number => {
    const directory = new PeerDirectory(100_000);
    for (const peer of peers) directory.add(spaces[0]!, many, bitOf(peer, 0));
    return directory.bytes;
  };
  const rows = 3 * 8_192; // in whole chunks
  expect(bytesWith(0, 15)).toBe(bytesWith(0));
  expect(bytesWith(0, 16) - bytesWith(0)).toBe(4 * rows);
  expect(bytesWith(0, 17, 63) - bytesWith(0)).toBe(8 * rows);
});
