/** SlotAllocator: disjoint, aligned, inside the arena, and never lost, whatever the order of calls. */
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { SlotAllocator } from './slot-allocator.ts';

const page = 4096;

describe('SlotAllocator', () => {
  it('allocated slots are disjoint and inside the arena, and all space comes back', () => {
    const sizes = [1, 3, 17, 64, 100].map((pages) => pages * page);
    const operation = fc.oneof(
      fc.record({ kind: fc.constant('allocate' as const), which: fc.nat(sizes.length - 1) }),
      fc.record({ kind: fc.constant('free' as const), which: fc.nat(1000) }),
    );
    fc.assert(
      fc.property(fc.array(operation, { maxLength: 400 }), (operations) => {
        const arenaBytes = 2 << 20;
        const allocator = new SlotAllocator(arenaBytes, 256 << 10);
        const live = new Map<number, number>();
        for (const { kind, which } of operations) {
          if (kind === 'allocate') {
            const isFree = allocator.hasFree(sizes[which]!);
            const slot = allocator.allocate(sizes[which]!);
            expect(slot !== undefined).toBe(isFree);
            if (slot === undefined) continue;
            expect(slot % page).toBe(0);
            expect(slot).toBeGreaterThanOrEqual(SlotAllocator.firstOffset);
            expect(slot + sizes[which]!).toBeLessThanOrEqual(arenaBytes);
            for (const [other, bytes] of live)
              expect(slot + sizes[which]! <= other || other + bytes <= slot).toBe(true);
            live.set(slot, sizes[which]!);
          } else if (live.size > 0) {
            const slot = [...live.keys()][which % live.size]!;
            expect(allocator.slotBytesOf(slot)).toBe(live.get(slot));
            expect(allocator.neighbours(slot)).toContain(slot);
            allocator.free(slot);
            live.delete(slot);
          }
          expect(allocator.allocatedBytes).toBe([...live.values()].reduce((sum, bytes) => sum + bytes, 0));
        }
        allocator.checkIntegrity();
        for (const slot of live.keys()) allocator.free(slot);
        allocator.checkIntegrity();
        expect(allocator.allocatedBytes).toBe(0);
        // Nothing is left of the former sizes: the whole arena can become one slot.
        expect(allocator.allocate(allocator.capacityBytes)).toBe(SlotAllocator.firstOffset);
      }),
      { numRuns: 60 },
    );
  });

  it('knows which slabs can be emptied, whatever is used and idle by turns', () => {
    const sizes = [3, 17, 64].map((pages) => pages * page);
    const operation = fc.record({
      kind: fc.constantFrom('allocate', 'allocate', 'free', 'idle', 'idle', 'use'),
      which: fc.nat(1000),
    });
    fc.assert(
      fc.property(fc.array(operation, { maxLength: 200 }), (operations) => {
        const allocator = new SlotAllocator(1 << 20, 64 << 10);
        /** Whether it is idle. */
        const live = new Map<number, boolean>();
        for (const { kind, which } of operations) {
          const slot =
            kind === 'allocate' ? allocator.allocate(sizes[which % 3]!) : [...live.keys()][which % live.size];
          if (slot === undefined) continue;
          if (kind === 'allocate') live.set(slot, false);
          else if (kind === 'free') {
            allocator.free(slot);
            live.delete(slot);
          } else {
            allocator.setIdle(slot, kind === 'idle');
            live.set(slot, kind === 'idle');
          }
          allocator.checkIntegrity();
          const isSlabIdle = (each: number): boolean => allocator.neighbours(each).every((other) => live.get(other)!);
          for (const [each, isIdle] of live) {
            expect([allocator.isIdle(each), allocator.isSlabIdle(each)]).toEqual([isIdle, isSlabIdle(each)]);
          }
          for (const size of sizes) {
            const ofSize = [...live.keys()].filter((each) => allocator.slotBytesOf(each) === size);
            expect(allocator.hasIdleSlab(size)).toBe(ofSize.some(isSlabIdle));
          }
        }
      }),
      { numRuns: 60 },
    );
  });

  it('takes the run that costs least, and none in which something is in use', () => {
    const allocator = new SlotAllocator((256 << 10) + page, 64 << 10);
    const slots = Array.from({ length: 16 }, () => allocator.allocate(4 * page)!); // four of each slab
    for (const slot of slots) if (slot !== slots[0]) allocator.setIdle(slot, true);
    for (const slot of slots.slice(9, 12)) allocator.free(slot);
    expect(allocator.cheapestRun(128 << 10)).toEqual(slots.slice(4, 9));
    allocator.setIdle(slots[8]!, false);
    expect(allocator.cheapestRun(128 << 10)).toBeUndefined();
    expect(allocator.cheapestRun(64 << 10)).toEqual(slots.slice(4, 8));
  });

  it('one size fills the arena but for the waste of a slab', () => {
    const allocator = new SlotAllocator(64 << 20);
    const slotBytes = 65 * page;
    let count = 0;
    while (allocator.allocate(slotBytes) !== undefined) count++;
    expect(count * slotBytes).toBeGreaterThan(0.85 * (64 << 20));
    expect(allocator.allocatedBytes).toBe(count * slotBytes);
  });

  it('a slot larger than a chunk takes a run of chunks', () => {
    const allocator = new SlotAllocator((4 << 20) + page, 256 << 10);
    expect(allocator.allocate(3 << 20)).toBe(page);
    expect(allocator.allocate(3 << 20)).toBeUndefined();
    expect(allocator.allocate(1 << 20)).toBe(page + (3 << 20));
  });

  it('misuse is a defect', () => {
    const allocator = new SlotAllocator(1 << 20);
    const slot = allocator.allocate(page)!;
    allocator.free(slot);
    expect(() => allocator.free(slot)).toThrow('not an allocated slot');
    expect(() => allocator.free(17)).toThrow('not an allocated slot');
    expect(() => allocator.allocate(100)).toThrow('not whole pages');
  });
});
