/**
 * The one suite that every tier passes: the contract of `tier.ts`, as tests. A backend calls it in a few lines.
 *
 *     tierConformance('disk on threads', (bench) => DiskTier.open({...}), { persistent: true });
 */

import { native } from '@kvtier/data-plane';
import { decodeHeader, type HashKey, headerBytes, type Namespace } from '@kvtier/identity';
import fc from 'fast-check';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import type { Tier, WriteStatus } from '../tier.ts';
import { hashNamed, namespaceNamed, TestBench } from './objects.ts';

export interface ConformanceOptions {
  readonly persistent: boolean;
  /** Payload bytes of its blocks; the tier must hold at least 16 of them. */
  readonly payloadBytes?: number;
  /** Runs of the property test. */
  readonly runs?: number;
  /** The tier refuses and fails at times, as `FaultyTier` does: then the suite tries again, and the rest must still hold. */
  readonly faulty?: boolean;
  /** What did not fit into a slot counts as held all the same: the arena's own. */
  readonly keepsMisfits?: boolean;
}

export function tierConformance(
  name: string,
  makeTier: (bench: TestBench) => Promise<Tier>,
  options: ConformanceOptions,
): void {
  const payloadBytes = options.payloadBytes ?? 20_000;
  const space = namespaceNamed('one');
  const other = namespaceNamed('two');
  const chain = Array.from({ length: 8 }, (_, i) => hashNamed(i));

  describe(`tier conformance: ${name}`, () => {
    let bench: TestBench;
    let tier: Tier;
    beforeEach(async () => {
      bench = new TestBench();
      tier = await makeTier(bench);
    });
    afterEach(async () => {
      tier.checkIntegrity();
      await tier.close();
      bench.dispose();
    });

    /** Write, and again what was refused for no reason of its own. */
    async function put(namespace: Namespace, hashes: readonly HashKey[]): Promise<WriteStatus[]> {
      const statuses = await bench.write(tier, namespace, hashes, payloadBytes);
      const again = hashes.filter((_, index) => options.faulty && statuses[index] === 'refused');
      if (again.length === 0) return statuses;
      const later = await put(namespace, again);
      return statuses.map((status) => (status === 'refused' ? later.shift()! : status));
    }

    async function get(namespace: Namespace, hashes: readonly HashKey[]): Promise<(string | undefined)[]> {
      const statuses = await bench.read(tier, namespace, hashes, payloadBytes);
      const again = hashes.filter((_, index) => options.faulty && statuses[index] === 'failed');
      if (again.length === 0) return statuses;
      const later = await get(namespace, again);
      return statuses.map((status) => (status === 'failed' ? later.shift() : status));
    }

    it('finds what it stored, and delivers exactly that', async () => {
      expect(tier.lookup(space, chain)).toBe(0);
      expect(await put(space, chain)).toEqual(chain.map(() => 'stored'));
      expect(tier.lookup(space, chain)).toBe(8);
      expect(await get(space, chain)).toEqual(chain.map(() => 'ready'));
      expect(tier.stats()).toMatchObject({ blocks: 8, hits: 8, corrupt: 0, inService: true, outOfServiceReason: '' });
    });

    it('never brings an object into a slot that is too small for it, and does not say any more that it is held', async () => {
      expect(await put(space, chain.slice(0, 1))).toEqual(['stored']);
      expect(await bench.read(tier, space, chain.slice(0, 1), payloadBytes / 10)).not.toContain('ready');
      expect(tier.stats().corrupt).toBe(0);
      if (options.keepsMisfits) expect(await get(space, chain.slice(0, 1))).toEqual(['ready']);
      else if (!options.faulty) expect(tier.lookup(space, chain)).toBe(0);
    });

    it('brings the end of an object back as it was written', async () => {
      const endS = 2 ** 32 - 1;
      let status: WriteStatus | undefined;
      do {
        [status] = await bench.write(tier, space, chain.slice(0, 1), payloadBytes, endS);
      } while (options.faulty && status === 'refused');
      const slot = bench.emptySlot(payloadBytes);
      let read: string | undefined;
      do {
        await tier.read(space, [{ hash: chain[0]!, slot }], (_, ended) => {
          read = ended;
        });
      } while (options.faulty && read === 'failed');
      expect(read).toBe('ready');
      expect(decodeHeader(bench.payloadAt(slot - headerBytes, headerBytes))).toMatchObject({ expiresS: endS });
      bench.tier.free(slot);
    });

    it('touches no slot any more when a read has settled, in whatever way', async () => {
      await put(space, chain);
      const blocks = Array.from({ length: 160 }, (_, i) => ({
        hash: chain[i % chain.length]!,
        slot: bench.emptySlot(payloadBytes),
      }));
      // The last one is a defect of the caller, behind many that are sound: what it throws comes when these are on their way.
      const nowhere = { hash: chain[0]!, slot: 2 ** 40 };
      let error: unknown;
      await tier
        .read(space, [...blocks, nowhere], () => {})
        .catch((thrown: unknown) => {
          error = thrown;
        });
      const pattern = Buffer.alloc(payloadBytes, 0x5c);
      for (const { slot } of blocks) native.arenaWrite(bench.arena, slot + headerBytes, pattern);
      for (let turn = 0; turn < 20; turn++) {
        await new Promise((resolve) => setTimeout(resolve, 5));
        const touched = blocks.filter(({ slot }) => !bench.payloadAt(slot, payloadBytes).equals(pattern));
        expect(touched.length, `of 160 slots, after ${error}`).toBe(0);
      }
      for (const { slot } of blocks) bench.tier.free(slot);
    });

    it('keeps namespaces apart', async () => {
      await put(space, chain);
      expect(tier.lookup(other, chain)).toBe(0);
      expect(await get(other, chain.slice(0, 2))).toEqual(['missing', 'missing']);
      await put(other, chain.slice(0, 2));
      expect(await get(other, chain.slice(0, 2))).toEqual(['ready', 'ready']);
      expect(await get(space, chain.slice(0, 2))).toEqual(['ready', 'ready']);
    });

    it('counts the contiguous prefix only', async () => {
      const holed = chain.filter((_, i) => i !== 3);
      await put(space, holed);
      expect(tier.lookup(space, chain)).toBe(3);
      expect(tier.lookup(space, chain.slice(4))).toBe(4);
      expect(await get(space, chain.slice(2, 5))).toEqual(['ready', 'missing', 'ready']);
    });

    it('holds a block once', async () => {
      expect(await put(space, chain.slice(0, 2))).toEqual(['stored', 'stored']);
      expect(await put(space, chain.slice(0, 3))).toEqual(['held', 'held', 'stored']);
      expect(tier.stats().blocks).toBe(3);
    });

    it('lists a write only when it has ended', async () => {
      const slot = bench.filledSlot(space, chain[0]!, payloadBytes);
      let status: WriteStatus | undefined;
      do {
        const writing = tier.write(space, [{ hash: chain[0]!, slot }]);
        expect(tier.lookup(space, chain)).toBe(0);
        [status] = await writing;
      } while (options.faulty && status === 'refused');
      expect(status).toBe('stored');
      expect(tier.lookup(space, chain)).toBe(1);
      bench.tier.free(slot);
    });

    it('refuses what is not the object that the slot is said to hold', async () => {
      const slot = bench.filledSlot(space, chain[0]!, payloadBytes);
      expect(await tier.write(space, [{ hash: chain[1]!, slot }])).toEqual(['refused']);
      const empty = bench.emptySlot(payloadBytes);
      expect(await tier.write(space, [{ hash: chain[1]!, slot: empty }])).toEqual(['refused']);
      expect(tier.lookup(space, [chain[1]!])).toBe(0);
      for (const each of [slot, empty]) bench.tier.free(each);
    });

    it('forgets what it is told to, and counts why', async () => {
      await put(space, chain);
      expect(tier.remove(space, [chain[7]!, hashNamed('none')], 'asked')).toBe(1);
      expect(tier.remove(space, [chain[6]!], 'corrupt')).toBe(1);
      expect(tier.remove(space, [chain[6]!], 'corrupt')).toBe(0);
      expect(tier.lookup(space, chain)).toBe(6);
      expect(await get(space, chain.slice(5))).toEqual(['ready', 'missing', 'missing']);
      expect(tier.stats()).toMatchObject({ blocks: 6, corrupt: 1 });
      expect(await put(space, [chain[6]!])).toEqual(['stored']);
    });

    it('stays within its budget however much is written, and keeps what is used', async () => {
      const favourite = [hashNamed('favourite')];
      await put(space, favourite);
      const { capacityBytes } = tier.stats();
      const rounds = Math.ceil((1.5 * capacityBytes) / payloadBytes / 16);
      // A codec makes little of these payloads: then it takes more of them.
      for (let round = 0; round < rounds || (tier.stats().evictions === 0 && round < 20 * rounds); round++) {
        const hashes = Array.from({ length: 16 }, (_, i) => hashNamed(`${round}.${i}`));
        await put(space, hashes);
        tier.touch(space, favourite);
        expect(tier.stats().bytes).toBeLessThanOrEqual(capacityBytes);
      }
      expect(tier.stats().evictions).toBeGreaterThan(0);
      expect(await get(space, favourite)).toEqual(['ready']);
    });

    it('behaves like a map under any sequence of operations, but for eviction', async () => {
      const keys = Array.from({ length: 12 }, (_, i) => hashNamed(`key ${i}`));
      const operation = fc.record({
        kind: fc.constantFrom('write', 'write', 'read', 'remove', 'touch', 'lookup'),
        keys: fc.uniqueArray(fc.nat(keys.length - 1), { minLength: 1, maxLength: 5 }),
        spaceNumber: fc.nat(1),
      });
      const property = fc.asyncProperty(fc.array(operation, { maxLength: 30 }), async (operations) => {
        const held = new Set<string>();
        for (const namespace of [space, other]) tier.remove(namespace, keys, 'asked');
        const evictionsBefore = tier.stats().evictions;
        for (const { kind, keys: numbers, spaceNumber } of operations) {
          const namespace = spaceNumber === 0 ? space : other;
          const hashes = numbers.map((number) => keys[number]!);
          const names = numbers.map((number) => `${spaceNumber}:${number}`);
          const evicted = () => tier.stats().evictions > evictionsBefore;
          if (kind === 'write') {
            const statuses = await put(namespace, hashes);
            names.forEach((name, i) => {
              if (!evicted()) expect(statuses[i]).toBe(held.has(name) ? 'held' : 'stored');
              held.add(name);
            });
          } else if (kind === 'read') {
            const statuses = await get(namespace, hashes);
            names.forEach((name, i) => {
              const expected = held.has(name) ? (evicted() ? ['ready', 'missing'] : ['ready']) : ['missing'];
              expect(expected).toContain(statuses[i]);
            });
          } else if (kind === 'remove') {
            const count = tier.remove(namespace, hashes, 'asked');
            const expected = names.filter((name) => held.delete(name)).length;
            if (evicted()) expect(count).toBeLessThanOrEqual(expected);
            else expect(count).toBe(expected);
          } else if (kind === 'touch') tier.touch(namespace, hashes);
          else {
            const gap = names.findIndex((name) => !held.has(name));
            const expected = gap === -1 ? names.length : gap;
            const count = tier.lookup(namespace, hashes);
            if (evicted()) expect(count).toBeLessThanOrEqual(expected);
            else expect(count).toBe(expected);
          }
          tier.checkIntegrity();
          expect(tier.stats().bytes).toBeLessThanOrEqual(tier.stats().capacityBytes);
        }
      });
      await fc.assert(property, { numRuns: options.runs ?? 20 });
    });

    it('tells its followers every change of what it holds', async () => {
      await put(space, chain.slice(0, 2));
      const held = new Set<string>();
      const end = tier.follow((change) => {
        for (const hash of change.hashes) {
          const name = (change.namespace?.key ?? '') + hash;
          if (change.kind === 'stored') expect(held.has(name)).toBe(false);
          else expect(held.has(name)).toBe(true);
          if (change.kind === 'stored') held.add(name);
          else held.delete(name);
        }
        if (change.kind === 'cleared') held.clear();
      });
      expect(held).toEqual(new Set(chain.slice(0, 2).map((hash) => space.key + hash)));
      await put(space, chain);
      await put(other, chain.slice(0, 3));
      tier.remove(space, chain.slice(0, 2), 'asked');
      const { capacityBytes } = tier.stats();
      for (let written = 0; written < 1.5 * capacityBytes; written += 8 * payloadBytes) {
        const hashes = Array.from({ length: 8 }, (_, i) => hashNamed(`${written}.${i}`));
        await put(space, hashes);
        for (const hash of [...hashes, ...chain]) {
          expect(held.has(space.key + hash)).toBe(tier.lookup(space, [hash]) === 1);
        }
      }
      expect(held.size).toBe(tier.stats().blocks);
      end();
      tier.remove(other, chain, 'asked');
      expect(held.size).toBeGreaterThan(0);
    });

    it('ends overlapping reads and writes, each block once', async () => {
      const all = Array.from({ length: 40 }, (_, i) => hashNamed(`overlap ${i}`));
      const batches = Array.from({ length: 8 }, (_, i) => all.slice(i * 5, i * 5 + 5));
      const writes = batches.map((batch) => put(space, batch));
      const reads = batches.map((batch) => get(space, batch));
      for (const statuses of await Promise.all(reads)) {
        for (const status of statuses) expect(['ready', 'missing']).toContain(status);
      }
      expect((await Promise.all(writes)).flat()).toEqual(all.map(() => 'stored'));
      expect((await get(space, all)).every((status) => status === 'ready')).toBe(true);
    });
  });
}
