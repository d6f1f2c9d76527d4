/**
 * ArenaTier under blocks of several sizes: no size starves another. After any history, who asks gets a slot whenever emptying
 * what is neither pinned nor unpublished would leave a run of chunks long enough; and every byte stays accounted for. The
 * model knows only offsets: which bytes of the arena must stay, chunk by chunk.
 */
import { rmSync } from 'node:fs';
import { type ArenaHandle, native } from '@kvtier/data-plane';
import { type PolicyName, policyNames } from '@kvtier/eviction';
import { type HashKey, hashKeyOf, namespaceFromDigest, slotBytesFor } from '@kvtier/identity';
import fc from 'fast-check';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { ArenaTier } from './arena-tier.ts';
import { SlotAllocator } from './slot-allocator.ts';

const path = `/dev/shm/kvtier-test-${process.pid}-arena-property`;
const chunkBytes = 64 << 10;
const chunkCount = 12;
const arenaBytes = SlotAllocator.firstOffset + chunkCount * chunkBytes;
/** From a sixteenth of a chunk to several chunks. */
const sizes = [3000, 14_000, 30_000, 60_000, 100_000, 260_000];
const namespace = namespaceFromDigest(Buffer.alloc(32, 3));

let arena: ArenaHandle;
beforeEach(() => {
  arena = native.arenaCreate(path, arenaBytes, 1);
});
afterEach(() => {
  native.arenaClose(arena);
  rmSync(path, { force: true });
});

interface Held {
  readonly slot: number;
  readonly size: number;
  readonly hash: HashKey;
  state: 'unpublished' | 'listed' | 'pinned';
}

/** The tier and a naive list of what it holds. */
class World {
  readonly held: Held[] = [];
  readonly tier: ArenaTier;
  #count = 0;
  #clock = 0;

  constructor(policy: PolicyName = 'lru') {
    const onEvict = (_: unknown, hash: HashKey): void => {
      const at = this.held.findIndex((each) => each.hash === hash);
      if (this.held[at]?.state !== 'listed') throw new Error('a block went that is in use');
      this.held.splice(at, 1);
    };
    const mayPass = 1; // what is in use is put aside at once, nearly
    this.tier = new ArenaTier({ arena, arenaBytes, chunkBytes, policy, mayPass, nowUs: () => ++this.#clock, onEvict });
  }

  allocate(size: number): Held | undefined {
    const mustFit = this.#longestFreeable() * chunkBytes >= slotBytesFor(size);
    const slot = this.tier.allocate(namespace, size);
    if (slot === undefined && mustFit) throw new Error(`a slot of ${size} bytes was refused`);
    if (slot === undefined) return undefined;
    for (const each of this.held) {
      const isApart = slot + slotBytesFor(size) <= each.slot || each.slot + slotBytesFor(each.size) <= slot;
      if (!isApart) throw new Error('slots overlap');
    }
    const name = Buffer.alloc(32);
    name.writeUInt32LE(++this.#count);
    const held: Held = { slot, size, hash: hashKeyOf(name), state: 'unpublished' };
    this.held.push(held);
    return held;
  }

  publish(held: Held): void {
    const fields = { hash: held.hash, parent: null, tokenCount: 16, payloadBytes: held.size, checksum: 0n };
    this.tier.publish(namespace, fields, held.slot);
    held.state = 'listed';
  }

  /** Chunks in the longest run that nobody's fixed slots touch; their slabs may reach no further than the longest slab. */
  #longestFreeable(): number {
    const isFixed = new Array<boolean>(chunkCount).fill(false);
    for (const { slot, size, state } of this.held) {
      if (state === 'listed') continue;
      // Its whole slab stays: at most the chunks that a slab of its size spans, on both sides.
      const span = Math.ceil(this.#allocator.slabSpanOf(slotBytesFor(size)) / chunkBytes);
      const first = Math.floor((slot - SlotAllocator.firstOffset) / chunkBytes);
      const last = Math.floor((slot + slotBytesFor(size) - 1 - SlotAllocator.firstOffset) / chunkBytes);
      for (let chunk = last - span + 1; chunk < first + span; chunk++) isFixed[chunk] = true;
    }
    let longest = 0;
    let run = 0;
    for (let chunk = 0; chunk < chunkCount; chunk++) {
      run = isFixed[chunk] ? 0 : run + 1;
      longest = Math.max(longest, run);
    }
    return longest;
  }

  /** Only for the shape of slabs, a pure function of the sizes. */
  readonly #allocator = new SlotAllocator(arenaBytes, chunkBytes);

  check(): void {
    this.tier.checkIntegrity();
    const listed = this.held.filter(({ state }) => state !== 'unpublished');
    const bytes = this.held.reduce((sum, { size }) => sum + slotBytesFor(size), 0);
    expect(this.tier.stats()).toMatchObject({ blocks: listed.length, bytes });
    if (listed.some(({ hash, slot }) => this.tier.get(namespace, hash)?.slot !== slot))
      throw new Error('a block is lost');
  }
}

describe('ArenaTier with blocks of several sizes', () => {
  it.each(policyNames)('under %s no size starves, whatever came before; all bytes are accounted for', (policy) => {
    const operation = fc.record({
      kind: fc.constantFrom('put', 'put', 'put', 'take', 'pin', 'unpin', 'give back', 'remove', 'touch'),
      which: fc.nat(1000),
    });
    const property = fc.property(fc.array(operation, { maxLength: 100, size: 'max' }), (operations) => {
      const world = new World(policy);
      const one = (state: Held['state'], which: number): Held | undefined => {
        const those = world.held.filter((each) => each.state === state);
        return those[which % Math.max(1, those.length)];
      };
      for (const { kind, which } of operations) {
        const [listed, pinned, taken] = (['listed', 'pinned', 'unpublished'] as const).map((s) => one(s, which));
        if (kind === 'put' || kind === 'take') {
          const held = world.allocate(sizes[which % sizes.length]!);
          if (held !== undefined && kind === 'put') world.publish(held);
        } else if (kind === 'pin' && listed !== undefined) {
          world.tier.pin(namespace, listed.hash);
          listed.state = 'pinned';
        } else if (kind === 'unpin' && pinned !== undefined) {
          world.tier.unpin(namespace, pinned.hash);
          pinned.state = 'listed';
        } else if (kind === 'give back' && taken !== undefined) {
          world.tier.free(taken.slot);
          world.held.splice(world.held.indexOf(taken), 1);
        } else if (kind === 'remove' && listed !== undefined) {
          expect(world.tier.remove(namespace, [listed.hash], 'asked')).toBe(1);
          world.held.splice(world.held.indexOf(listed), 1);
        } else if (kind === 'touch' && listed !== undefined) world.tier.touch(namespace, [listed.hash]);
        world.check();
      }
    });
    fc.assert(property, { numRuns: 25 });
  });

  it('every size gets a slab out of an arena that another size has filled', () => {
    for (const filler of [3000, 60_000, 260_000]) {
      for (const size of sizes) {
        const world = new World();
        while (world.tier.stats().evictions === 0) world.publish(world.allocate(filler)!);
        const slabSlots = Math.max(1, Math.floor(chunkBytes / slotBytesFor(size)));
        for (let i = 0; i < slabSlots; i++) expect(world.allocate(size)).toBeDefined(); // kept, not published
        world.check();
      }
    }
  });
});
