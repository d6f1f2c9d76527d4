import type { HashKey, Namespace } from '@kvtier/identity';
import { Followers } from '@kvtier/tiers';
import fc from 'fast-check';
import { expect, test } from 'vitest';
import { keysOf, type PackedHashes, Residency } from './residency.ts';
import { namespaceNamed } from './testing/bench.ts';

const all = 0xff;
/** A 32-byte hash with a number in it, spread so that neighbours share nothing. */
function named(number: number): HashKey {
  const bytes = Buffer.alloc(32);
  for (let at = 0; at < 32; at += 4) bytes.writeUInt32LE(Math.imul(number + 1, 0x9e3779b1 + 2 * at) >>> 0, at);
  return bytes.toString('latin1') as HashKey;
}
const pack = (keys: readonly HashKey[]): PackedHashes => ({
  packed: Buffer.concat([Buffer.alloc(3), Buffer.from(keys.join(''), 'latin1')]).subarray(3), // unaligned, as frames are
  hashBytes: 32,
});

test('a random life of four tiers is what a map says, and packed and unpacked chains agree', () => {
  const step = fc.record({
    act: fc.constantFrom('set', 'set', 'set', 'clear', 'clear', 'cleared'),
    tier: fc.nat(3),
    space: fc.nat(1),
    first: fc.nat(600),
    count: fc.integer({ min: 1, max: 200 }),
  });
  fc.assert(
    fc.property(fc.array(step, { minLength: 1, maxLength: 60 }), (life) => {
      const spaces = [namespaceNamed('n'), namespaceNamed('m')];
      const residency = new Residency();
      const tiers = Array.from({ length: 4 }, () => new ListTier());
      for (const [bit, tier] of tiers.entries()) residency.follow(tier, bit);
      for (const { act, tier, space, first, count } of life) {
        const hashes = Array.from({ length: count }, (_, i) => named(first + i));
        if (act === 'cleared' && count < 40) tiers[tier]!.clear();
        else if (act === 'clear') tiers[tier]!.remove(spaces[space]!, hashes);
        else if (act === 'set') tiers[tier]!.store(spaces[space]!, hashes);
      }
      residency.checkIntegrity(tiers);
      for (const space of spaces) {
        const keys = Array.from({ length: 800 }, (_, i) => named(i));
        const masks = keys.map((hash) =>
          tiers.reduce((mask, tier, bit) => mask | (tier.has(space, hash) ? 1 << bit : 0), 0),
        );
        expect(keys.map((hash) => residency.tiers(space, hash))).toEqual(masks);
        for (const from of [0, 100, 333]) {
          const end = masks.findIndex((mask, at) => at >= from && (mask & 0b1011) === 0);
          const expected = (end === -1 ? 800 : end) - from;
          for (const chain of [keys.slice(from), pack(keys.slice(from))]) {
            const { held, found } = residency.lookup(space, chain, 0b1011, 0);
            expect(held).toBe(expected);
            expect([...found.subarray(0, held)]).toEqual(masks.slice(from, from + held));
          }
        }
      }
    }),
    { numRuns: 60 },
  );
});

test('bytes per block stay below 64, also while it grows and after it has shrunk', () => {
  const residency = new Residency();
  const space = namespaceNamed('n');
  for (let i = 0; i < 100_000; i++) {
    residency.set(space, named(i), 1);
    if (i > 20_000 && i % 997 === 0) expect(residency.bytes / residency.count).toBeLessThan(64);
  }
  for (let i = 0; i < 100_000; i++) residency.clear(space, named(i), 1);
  expect(residency.count).toBe(0);
  for (let i = 0; i < 50; i++) expect(residency.tiers(space, named(i * 1999))).toBe(0);
});

test('an expired block ends the prefix; tenant and expiry go with the last tier', () => {
  const residency = new Residency();
  const space = namespaceNamed('n');
  const keys = [0, 1, 2].map(named);
  for (const hash of keys) residency.set(space, hash, 1);
  residency.mark(space, keys[1]!, 4095, 10);
  expect(residency.lookup(space, keys, all, 9).held).toBe(3);
  expect(residency.lookup(space, keys, all, 10).held).toBe(1);
  expect(residency.tenant(space, keys[1]!)).toBe(4095);
  residency.clear(space, keys[1]!, 1);
  residency.set(space, keys[1]!, 2);
  expect([residency.tenant(space, keys[1]!), residency.expiresS(space, keys[1]!)]).toEqual([0, 0]);
  expect(keysOf(pack(keys), 1, 3)).toEqual(keys.slice(1));
});

/** A tier reduced to its list. */
class ListTier {
  readonly #followers = new Followers();
  readonly #held = new Map<string, [Namespace, HashKey]>();

  has(namespace: Namespace, hash: HashKey): boolean {
    return this.#held.has(namespace.key + hash);
  }

  store(namespace: Namespace, hashes: readonly HashKey[]): void {
    for (const hash of hashes) this.#held.set(namespace.key + hash, [namespace, hash]);
    this.#followers.stored(namespace, hashes);
  }

  remove(namespace: Namespace, hashes: readonly HashKey[]): void {
    for (const hash of hashes) this.#held.delete(namespace.key + hash);
    this.#followers.removed(namespace, hashes);
  }

  clear(): void {
    this.#held.clear();
    this.#followers.cleared();
  }

  follow(listener: Parameters<Followers['follow']>[0]): () => void {
    return this.#followers.follow(
      listener,
      [...this.#held.values()].map(([namespace, hash]) => [namespace, [hash]] as const),
    );
  }
}
