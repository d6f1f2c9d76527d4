import type { HashKey, Namespace } from '@kvtier/identity';
import { Followers, type Following } from '@kvtier/tiers';
import { watchTurns } from '@kvtier/tiers/testing';
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { keysOf, type PackedHashes, tagOf } from './chain-words.ts';
import { HeldSketch } from './held-sketch.ts';
import { Residency } from './residency.ts';
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

it('a random life of four tiers is what a map says, and packed and unpacked chains agree', () => {
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
      const told = new Uint8Array(64);
      const write = (bucket: number, flags: number) => told.fill(flags, bucket, bucket + 1);
      const sketch = new HeldSketch({ buckets: told.length, write }, 1);
      const residency = new Residency(undefined, undefined, (...change) => sketch.change(...change));
      const tiers = Array.from({ length: 4 }, () => new ListTier());
      for (const [bit, tier] of tiers.entries()) residency.follow(tier, bit);
      for (const { act, tier, space, first, count } of life) {
        const hashes = Array.from({ length: count }, (_, i) => named(first + i));
        if (act === 'cleared' && count < 40) tiers[tier]!.clear();
        else if (act === 'clear') tiers[tier]!.remove(spaces[space]!, hashes);
        else if (act === 'set') tiers[tier]!.store(spaces[space]!, hashes);
      }
      residency.checkIntegrity(tiers);
      const expectedTold = new Uint8Array(told.length);
      for (const space of spaces) {
        const keys = Array.from({ length: 800 }, (_, i) => named(i));
        const masks = keys.map((hash) =>
          tiers.reduce((mask, tier, bit) => mask | (tier.has(space, hash) ? 1 << bit : 0), 0),
        );
        expect(keys.map((hash) => residency.tiers(space, hash))).toEqual(masks);
        // As an engine reads it: the first 4 bytes of the hash, and what the node says of the namespace.
        for (const [at, hash] of keys.entries()) {
          const word = Buffer.from(hash, 'latin1').readInt32LE() ^ tagOf(space.key)[0]!;
          expectedTold[word & 63]! |= (masks[at]! === 0 ? 0 : 2) | (5 * (masks[at]! & 1));
        }
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
      expect(told).toEqual(expectedTold);
    }),
    { numRuns: 60 },
  );
});

it('while tiers list, lose all, come back and lose all again, the index never names one that does not hold the block', async () => {
  const step = fc.record({
    act: fc.constantFrom('store', 'store', 'store', 'remove', 'clear', 'turn', 'turn', 'turns', 'follow'),
    tier: fc.nat(2),
    space: fc.nat(1),
    first: fc.nat(60),
    count: fc.integer({ min: 1, max: 30 }),
  });
  await fc.assert(
    fc.asyncProperty(fc.array(step, { minLength: 1, maxLength: 80 }), async (life) => {
      const spaces = [namespaceNamed('n'), namespaceNamed('m')];
      const keys = Array.from({ length: 100 }, (_, i) => named(i));
      const residency = new Residency(undefined, 7);
      const tiers = Array.from({ length: 3 }, () => new PagedTier());
      // What followers of the index were told of each tier.
      const told = tiers.map(() => new Set<string>());
      let followed = 0;
      const follow = (): void => {
        const mine = told[followed]!;
        const onChange = (_record: number, namespace: Namespace, hash: HashKey, held: boolean): void => {
          expect(mine.has(namespace.key + hash)).toBe(!held);
          expect(residency.tiers(namespace, hash) & (1 << followed)).toBeDefined();
          if (held) mine.add(namespace.key + hash);
          else mine.delete(namespace.key + hash);
        };
        residency.follow(tiers[followed]!, followed, onChange, () => mine.clear());
        followed++;
      };
      const check = (isExact: boolean): void => {
        for (const space of spaces) {
          const masks = keys.map((hash) => {
            let mask = 0;
            for (let bit = 0; bit < followed; bit++) if (tiers[bit]!.has(space, hash)) mask |= 1 << bit;
            return mask;
          });
          const indexed = keys.map((hash) => residency.tiers(space, hash));
          if (isExact) expect(indexed).toEqual(masks);
          else expect(indexed.filter((mask, at) => (mask & ~masks[at]!) !== 0)).toEqual([]);
          for (const available of [0b111, 0b010]) {
            const { held, found } = residency.lookup(space, keys, available, 0);
            const end = indexed.findIndex((mask) => (mask & available) === 0);
            expect(held).toBe(end === -1 ? keys.length : end);
            expect([...found.subarray(0, held)]).toEqual(indexed.slice(0, held));
          }
          for (const [bit, set] of told.entries()) {
            const mine = keys.filter((hash) => set.has(space.key + hash));
            expect(mine).toEqual(keys.filter((_, at) => (indexed[at]! & (1 << bit)) !== 0));
          }
        }
        residency.checkIntegrity(tiers.slice(0, followed));
      };
      follow();
      for (const { act, tier, space, first, count } of life) {
        const hashes = keys.slice(first, first + count);
        if (act === 'store') tiers[tier]!.store(spaces[space]!, hashes);
        else if (act === 'remove') tiers[tier]!.remove(spaces[space]!, hashes);
        else if (act === 'clear') tiers[tier]!.clear();
        else if (act === 'follow' && followed < tiers.length) follow();
        else for (let turn = 0; turn < (act === 'turns' ? 12 : 1); turn++) await new Promise((go) => setImmediate(go));
        check(false);
      }
      while (!residency.settled) await new Promise((go) => setImmediate(go));
      check(true);
      residency.close();
    }),
    { numRuns: 100 },
  );
});

it('a tier of 150,000 blocks is listed, and lost, with no turn above 50 ms', async () => {
  const count = 150_000;
  const space = namespaceNamed('n');
  const tier = new PagedTier(4096);
  const keys = Array.from({ length: count }, (_, i) => named(i));
  tier.store(space, keys);
  const residency = new Residency();
  const turns = watchTurns();
  const begun = process.cpuUsage();
  const settle = async (): Promise<void> => {
    while (!residency.settled) await new Promise((go) => setTimeout(go, 1));
  };
  residency.follow(tier, 1);
  await settle();
  expect(residency.count).toBe(count);
  tier.clear();
  expect(residency.lookup(space, keys.slice(0, 10), all, 0).held).toBe(0);
  await settle();
  expect(residency.count).toBe(0);
  const { user, system } = process.cpuUsage(begun);
  // Of some 300 ms; on a slow machine both are longer.
  expect(turns.take().cpuMs).toBeLessThan(Math.max(50, (user + system) / 1_000 / 8));
  turns.end();
});

it('bytes per block stay below 64, also while it grows and after it has shrunk', () => {
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

it('an expired block ends the prefix; tenant and expiry go with the last tier', () => {
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
  #held = new Map<string, [Namespace, HashKey]>();

  get followers(): Followers {
    return this.#followers;
  }

  get held(): Map<string, [Namespace, HashKey]> {
    return this.#held;
  }

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
    this.#held = new Map(); // a large one is cleared in a turn that is long enough
    this.#followers.cleared();
  }

  follow(listener: Parameters<Followers['follow']>[0]): () => void {
    return this.#followers.follow(
      listener,
      [...this.#held.values()].map(([namespace, hash]) => [namespace, [hash]] as const),
    );
  }
}

/** One that lists a few blocks at a time. */
class PagedTier extends ListTier {
  readonly #page: number;

  constructor(page = 3) {
    super();
    this.#page = page;
  }

  followInPages(listener: Parameters<Followers['follow']>[0]): Following {
    return this.followers.followInPages(listener, this.#pages());
  }

  *#pages(): Generator<readonly [Namespace, HashKey[]] | undefined, void> {
    const { held } = this;
    let left = this.#page;
    for (const [namespace, hash] of held.values()) {
      // All that was held has gone.
      if (held !== this.held) return yield* this.#pages();
      yield [namespace, [hash]];
      if (--left > 0) continue;
      left = this.#page;
      yield undefined;
    }
  }
}
