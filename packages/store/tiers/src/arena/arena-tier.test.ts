/** ArenaTier: eviction order, pins, several sizes; against a naive model of what may be where. */
import { randomBytes } from 'node:crypto';
import { rmSync } from 'node:fs';
import { type ArenaHandle, native } from '@kvtier/data-plane';
import { type HashKey, hashKeyOf, headerBytes, type Namespace, namespaceFromDigest } from '@kvtier/identity';
import fc from 'fast-check';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { roomAsks } from '../kit/passing-over.ts';
import { ArenaTier } from './arena-tier.ts';
import { SizeClass } from './size-class.ts';
import { SlotAllocator } from './slot-allocator.ts';

const path = `/dev/shm/kvtier-test-${process.pid}-arena-tier`;
const arenaBytes = 1 << 20;
const chunkBytes = 64 << 10;
const namespace: Namespace = namespaceFromDigest(Buffer.alloc(32, 7));
const hash = (number: number): HashKey => {
  const bytes = Buffer.alloc(32);
  bytes.writeUInt32LE(number);
  return hashKeyOf(bytes);
};

let arena: ArenaHandle;
beforeEach(() => {
  arena = native.arenaCreate(path, arenaBytes, 1);
});
afterEach(() => {
  vi.restoreAllMocks();
  native.arenaClose(arena);
  rmSync(path, { force: true });
});

const makeTier = (onEvict: (hash: HashKey) => void = () => {}, nowUs = () => 0): ArenaTier =>
  new ArenaTier({ arena, arenaBytes, chunkBytes, nowUs, onEvict: (_, evicted) => onEvict(evicted) });

/** Allocate, fill with random bytes, publish. False when there was no slot. */
function put(tier: ArenaTier, number: number, payloadBytes: number, parent: number | null = null): boolean {
  const slot = tier.allocate(namespace, payloadBytes);
  if (slot === undefined) return false;
  const payload = randomBytes(payloadBytes);
  native.arenaWrite(arena, slot + headerBytes, payload);
  const fields = {
    hash: hash(number),
    parent: parent === null ? null : hash(parent),
    tokenCount: 16,
    payloadBytes,
    checksum: native.xxh3_64(payload),
  };
  tier.publish(namespace, fields, slot);
  return true;
}

describe('ArenaTier', () => {
  it('full of what is pinned, it asks for room, some times, before it refuses', () => {
    const tier = makeTier();
    const payloadBytes = 60 << 10;
    let held = 0;
    while (held < 15 && put(tier, held, payloadBytes)) tier.pin(namespace, hash(held++));
    let asked = 0;
    let isFruitful = false;
    tier.whenFull(() => {
      if (++asked === 3 || isFruitful) tier.unpin(namespace, hash(--held));
      return asked < 100;
    });
    expect([put(tier, 100, payloadBytes), asked]).toEqual([true, 3]);
    tier.pin(namespace, hash(100));
    expect([put(tier, 101, payloadBytes), asked]).toEqual([false, 3 + roomAsks]);
    isFruitful = true;
    expect([put(tier, 102, payloadBytes), put(tier, 103, payloadBytes)]).toEqual([true, true]);
    expect([tier.stats().refused, tier.stats().evictions]).toEqual([1, 3]);
    tier.checkIntegrity();
  });

  it('looks for a victim again only where something was let go that helps', () => {
    const tier = makeTier();
    const payloadBytes = 60 << 10;
    let held = 0;
    while (held < 14 && put(tier, held, payloadBytes)) tier.pin(namespace, hash(held++));
    put(tier, 50, 5_000);
    tier.pin(namespace, hash(50));
    for (let number = 0; number < held; number++) tier.pin(namespace, hash(number));
    const looks = vi.spyOn(SizeClass.prototype, 'coldest');
    const looksOf = (): number => looks.mock.calls.splice(0).length;
    put(tier, 100, payloadBytes);
    const one = looksOf();
    let letGo = 0;
    tier.whenFull(() => {
      tier.unpin(namespace, hash(letGo++)); // of which others keep another pin
      return true;
    });
    expect([put(tier, 100, payloadBytes), looksOf()]).toEqual([false, one]);
    tier.whenFull(() => {
      if (tier.get(namespace, hash(50)) === undefined) return false;
      tier.unpin(namespace, hash(50)); // of another size, alone in its slab
      tier.whenFull(() => false);
      return true;
    });
    expect(put(tier, 100, payloadBytes)).toBe(true);
    expect([one, looksOf()]).toEqual([1, 3]); // at its own twice, and at the other that has a slab to give
    looks.mockRestore();
    tier.checkIntegrity();
  });

  it('evicts the least recently used first, and chains from their tail', () => {
    const evicted: HashKey[] = [];
    const tier = makeTier((gone) => evicted.push(gone));
    const payloadBytes = 60 << 10; // one per chunk: the arena holds 15
    for (let number = 0; number < 10; number++) put(tier, number, payloadBytes, number === 0 ? null : number - 1);
    for (let number = 100; number < 105; number++) put(tier, number, payloadBytes);
    tier.touch(namespace, [hash(0), hash(1)]);
    for (let number = 200; number < 209; number++) expect(put(tier, number, payloadBytes)).toBe(true);
    expect(evicted).toEqual([9, 8, 7, 6, 5, 4, 3, 2, 100].map(hash));
    expect(tier.lookup(namespace, [hash(0), hash(1), hash(2)])).toBe(2);
    tier.checkIntegrity();
  });

  it('under s3-fifo a block that was evicted unused and comes back outlives newcomers', () => {
    const tier = new ArenaTier({ arena, arenaBytes, chunkBytes, nowUs: () => 0, policy: 's3-fifo' });
    const payloadBytes = 60 << 10; // one per chunk: the arena holds 15
    for (let number = 0; number < 16; number++) put(tier, number, payloadBytes);
    expect(tier.get(namespace, hash(0))).toBeUndefined();
    put(tier, 0, payloadBytes);
    for (let number = 100; number < 130; number++) put(tier, number, payloadBytes);
    expect([0, 1, 99, 100, 129].filter((number) => tier.get(namespace, hash(number)) !== undefined)).toEqual([0, 129]);
    tier.checkIntegrity();
  });

  it('a pinned block stays; when nothing may go there is no slot', () => {
    const tier = makeTier();
    const payloadBytes = 60 << 10;
    let count = 0;
    while (tier.stats().evictions === 0 && put(tier, count, payloadBytes)) count++;
    for (let number = 1; number < count; number++) tier.pin(namespace, hash(number));
    expect(put(tier, 1000, payloadBytes)).toBe(false);
    tier.unpin(namespace, hash(3));
    expect(put(tier, 1000, payloadBytes)).toBe(true);
    expect(tier.get(namespace, hash(3))).toBeUndefined();
    tier.checkIntegrity();
  });

  it('a block removed while pinned is a miss at once and its bytes stay until the last unpin', () => {
    const tier = makeTier();
    put(tier, 1, 5000);
    const { slot, checksum } = tier.get(namespace, hash(1))!;
    tier.pin(namespace, hash(1));
    expect(tier.remove(namespace, [hash(1)], 'corrupt')).toBe(1);
    expect(tier.lookup(namespace, [hash(1)])).toBe(0);
    while (tier.stats().evictions === 0) put(tier, tier.stats().blocks + 10, 5000);
    expect(native.xxh3_64(native.arenaRead(arena, slot + headerBytes, 5000))).toBe(checksum);
    tier.unpin(namespace, hash(1));
    tier.checkIntegrity();
  });

  it('a name that comes back while its former block is still pinned: neither goes before the last pin', () => {
    const tier = makeTier();
    const stored: { slot: number; checksum: bigint }[] = [];
    for (let life = 0; life < 3; life++) {
      put(tier, 1, 5000);
      stored.push(tier.get(namespace, hash(1))!);
      tier.pin(namespace, hash(1));
      if (life < 2) tier.remove(namespace, [hash(1)], 'corrupt');
    }
    for (let unpins = 0; unpins < 2; unpins++) {
      tier.unpin(namespace, hash(1)); // whose pin this was, nobody can say
      const { evictions } = tier.stats();
      while (tier.stats().evictions === evictions) put(tier, tier.stats().blocks + 1000 * (unpins + 1), 5000);
      for (const { slot, checksum } of stored) {
        expect(native.xxh3_64(native.arenaRead(arena, slot + headerBytes, 5000))).toBe(checksum);
      }
      tier.checkIntegrity();
    }
    tier.unpin(namespace, hash(1));
    expect(tier.get(namespace, hash(1))?.slot).toBe(stored[2]!.slot); // the last life is still listed
    tier.checkIntegrity();
  });

  it('another block size takes whole slabs when its own has nothing to give', () => {
    const tier = makeTier();
    let small = 0;
    while (tier.stats().evictions === 0) put(tier, small++, 3000);
    expect(put(tier, 5000, 300 << 10)).toBe(true);
    expect(tier.lookup(namespace, [hash(5000)])).toBe(1);
    tier.checkIntegrity();
  });

  /** Blocks of so many bytes each, numbered from `first` on, that would fill the arena so many times. */
  function fill(tier: ArenaTier, first: number, payloadBytes: number, times: number): void {
    const count = Math.ceil((times * arenaBytes) / payloadBytes);
    for (let number = 0; number < count; number++) expect(put(tier, first + number, payloadBytes)).toBe(true);
  }
  const heldBytes = (tier: ArenaTier, first: number, payloadBytes: number): number => {
    let count = 0;
    for (let number = 0; number < 10_000; number++) if (tier.get(namespace, hash(first + number))) count++;
    return count * payloadBytes;
  };

  let us = 0;
  it('a size that nobody uses any more ends with nothing, whoever else is there', () => {
    const tier = makeTier(undefined, () => ++us);
    for (const [at, payloadBytes] of [3_500, 7_500, 11_500, 15_500].entries()) {
      fill(tier, at * 10_000, payloadBytes, 3);
      tier.checkIntegrity();
    }
    expect(heldBytes(tier, 30_000, 15_500)).toBeGreaterThan(0.85 * arenaBytes);
  });

  it.each([
    [
      'a block of which is used now and then',
      (tier: ArenaTier) => {
        const held = Array.from({ length: 1_000 }, (_, number) => hash(number)).find((each) =>
          tier.get(namespace, each),
        );
        tier.touch(namespace, [held!]);
      },
    ],
    ['of which blocks come now and then', (tier: ArenaTier, round: number) => void put(tier, 1_000_000 + round, 3_500)],
  ])('a size %s keeps its share, however much comes of another one', (_, use) => {
    const tier = makeTier(undefined, () => ++us);
    fill(tier, 0, 3_500, 2);
    const { blocks } = tier.stats();
    for (let round = 0; round < 20; round++) {
      fill(tier, 10_000 * (round + 1), 15_500, 0.5);
      use(tier, round);
    }
    expect(tier.stats().bytes).toBeGreaterThan(0.9 * arenaBytes);
    const others = heldBytes(tier, 200_000, 15_500);
    expect(others).toBeLessThan(0.6 * arenaBytes);
    expect(tier.stats().blocks).toBeGreaterThan(blocks / 3);
    tier.checkIntegrity();
  });

  it('of a size that nobody uses, what is pinned stays, and is looked for no more than once', () => {
    const tier = makeTier(undefined, () => ++us);
    fill(tier, 0, 3_500, 2);
    const held = Array.from({ length: 1_000 }, (_, number) => hash(number)).filter((each) => tier.get(namespace, each));
    for (const each of held) tier.pin(namespace, each);
    expect(put(tier, 10_000, 15_500)).toBe(false);
    for (const each of held.slice(0, held.length / 2)) tier.unpin(namespace, each);
    fill(tier, 10_000, 15_500, 3);
    const looks = vi.spyOn(SizeClass.prototype, 'coldestOf');
    fill(tier, 20_000, 15_500, 1);
    expect(looks).not.toHaveBeenCalled();
    looks.mockRestore();
    expect(held.filter((each) => tier.get(namespace, each)).length).toBeGreaterThanOrEqual(held.length / 2);
    const { blocks } = tier.stats();
    for (const each of held.slice(held.length / 2)) tier.unpin(namespace, each);
    fill(tier, 30_000, 15_500, 1);
    expect(held.filter((each) => tier.get(namespace, each))).toEqual([]);
    expect(tier.stats().blocks).toBeLessThan(blocks);
    tier.checkIntegrity();
  });

  describe('of another size each slab of which has one block in use', () => {
    const [payloadBytes, otherBytes] = [7_500, 60 << 10];
    /** One block of each slab. */
    const kept: number[] = [];
    let tier: ArenaTier;
    beforeEach(() => {
      tier = makeTier(undefined, () => ++us);
      put(tier, 0, otherBytes);
      for (let number = 1; tier.stats().evictions === 0; number++) put(tier, number, payloadBytes);
      kept.length = 0;
      const slabs = new Set<number>();
      for (let number = 1; number < 200; number++) {
        const slot = tier.get(namespace, hash(number))?.slot;
        const slab = slot === undefined ? -1 : Math.floor((slot - SlotAllocator.firstOffset) / chunkBytes);
        if (slab < 0 || slabs.has(slab)) continue;
        slabs.add(slab);
        kept.push(number);
        tier.pin(namespace, hash(number));
      }
    });

    it('none is walked, whatever else is done to its blocks meanwhile', () => {
      expect(kept).toHaveLength(14);
      const walks = vi.spyOn(SizeClass.prototype, 'coldestOf');
      const slots = vi.spyOn(SlotAllocator.prototype, 'neighbours');
      for (let round = 0; round < 100; round++) {
        expect(put(tier, 1_000 + round, otherBytes)).toBe(true);
        put(tier, 2_000 + round, payloadBytes);
        tier.touch(namespace, [hash(2_000 + round)]);
        for (const act of ['pin', 'unpin'] as const) tier[act](namespace, hash(2_000 + round));
      }
      expect([walks.mock.calls.length, slots.mock.calls.length]).toEqual([0, 0]);
      expect(kept.every((number) => tier.get(namespace, hash(number)) !== undefined)).toBe(true);
      tier.checkIntegrity();
    });

    it('one of them is taken as soon as nobody uses that block', () => {
      put(tier, 1_000, otherBytes);
      const { blocks } = tier.stats();
      tier.unpin(namespace, hash(kept[5]!));
      put(tier, 1_001, otherBytes);
      expect(tier.get(namespace, hash(kept[5]!))).toBeUndefined();
      expect(tier.stats().blocks).toBe(blocks - 8 + 1);
      put(tier, 1_002, otherBytes); // in its own place
      expect(tier.stats().blocks).toBe(blocks - 8 + 1);
      expect([1_001, 1_002].map((number) => tier.get(namespace, hash(number)) !== undefined)).toEqual([true, true]);
      tier.checkIntegrity();
    });

    it('a block that a device may still read is in use, too', () => {
      const { slot } = tier.get(namespace, hash(kept[5]!))!;
      tier.hold(slot);
      tier.unpin(namespace, hash(kept[5]!));
      put(tier, 1_000, otherBytes);
      expect(tier.get(namespace, hash(kept[5]!))).toBeDefined();
      tier.release(slot);
      put(tier, 1_001, otherBytes);
      expect(tier.get(namespace, hash(kept[5]!))).toBeUndefined();
      tier.checkIntegrity();
    });
  });

  it('agrees with a model under random operations', () => {
    const sizes = [3000, 20_000, 60_000];
    const operation = fc.record({
      kind: fc.constantFrom('put', 'pin', 'unpin', 'remove', 'touch', 'abandon'),
      block: fc.nat(40),
    });
    fc.assert(
      fc.property(fc.array(operation, { maxLength: 200 }), (operations) => {
        const listed = new Set<number>();
        const pins = new Map<number, number>();
        const tier = makeTier((gone) => {
          const number = [...listed].find((candidate) => hash(candidate) === gone);
          expect(pins.get(number!) ?? 0).toBe(0);
          listed.delete(number!);
        });
        for (const { kind, block } of operations) {
          const pinned = pins.get(block) ?? 0;
          if (kind === 'put' && !listed.has(block) && pinned === 0) {
            if (put(tier, block, sizes[block % 3]!)) listed.add(block);
          } else if (kind === 'pin' && listed.has(block)) {
            tier.pin(namespace, hash(block));
            pins.set(block, pinned + 1);
          } else if (kind === 'unpin' && pinned > 0) {
            tier.unpin(namespace, hash(block));
            pins.set(block, pinned - 1);
          } else if (kind === 'remove') {
            expect(tier.remove(namespace, [hash(block)], 'asked')).toBe(listed.delete(block) ? 1 : 0);
          } else if (kind === 'touch') tier.touch(namespace, [hash(block)]);
          else if (kind === 'abandon') {
            const slot = tier.allocate(namespace, sizes[block % 3]!);
            if (slot !== undefined) tier.free(slot);
          }
          for (let number = 0; number <= 40; number++) {
            expect(tier.get(namespace, hash(number)) !== undefined).toBe(listed.has(number));
          }
        }
        tier.checkIntegrity();
        expect(tier.stats().blocks).toBe(listed.size);
      }),
      { numRuns: 30 },
    );
  });
});
