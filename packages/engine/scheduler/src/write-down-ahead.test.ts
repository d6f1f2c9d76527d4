import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { naiveAnswer, prompt, SchedulerRig } from './testing/rig.ts';
import { usedBytes } from './testing/used-bytes.ts';
import { type ChainPiece, WriteDownAhead } from './write-down-ahead.ts';

const hashBytes = 16;

/** A pool with nothing but content: which chain's prefix each block holds. */
class Pool {
  readonly cached = new Map<number, string>();
  readonly policy = new WriteDownAhead(
    12,
    hashBytes,
    (block, hash) => this.cached.get(block) === hash.toString('latin1'),
  );
  /** Hashes that went down. */
  readonly tier = new Set<string>();

  /** The chain `name`, in these blocks. */
  fill(name: string, blocks: readonly number[]): void {
    const packed = chain(name, blocks.length);
    blocks.forEach((block, i) => {
      this.cached.set(block, hashAt(packed, i));
    });
    this.policy.computed(packed, [...blocks], 0, blocks.length);
  }

  take(soon: readonly number[], room = 100): ChainPiece[] {
    const pieces = this.policy.takeDue(soon, room);
    for (const { hashes, firstBlock, blockIds } of pieces) {
      expect(hashes.length).toBe((firstBlock + blockIds.length) * hashBytes);
      blockIds.forEach((block, i) => {
        expect(this.cached.get(block)).toBe(hashAt(hashes, firstBlock + i));
        this.tier.add(hashAt(hashes, firstBlock + i));
      });
    }
    return pieces;
  }
}

/** Hash `i` of a chain names the chain and the place; chains of one letter share their first block with each other's namesakes only. */
const chain = (name: string, blocks: number): Buffer =>
  Buffer.concat(Array.from({ length: blocks }, (_, i) => Buffer.from(`${name}${i}`.padEnd(hashBytes, '.'))));
const hashAt = (packed: Buffer, i: number): string => packed.toString('latin1', i * hashBytes, (i + 1) * hashBytes);
const idsOf = (pieces: readonly ChainPiece[]): (readonly number[])[] => pieces.map(({ blockIds }) => blockIds);

describe('what goes down ahead of eviction', () => {
  it('is the block that is reused soon, with what comes before it in its chain, parents first', () => {
    const pool = new Pool();
    pool.fill('a', [1, 2, 3, 4]);
    const [piece, ...others] = pool.take([3]);
    expect(others).toEqual([]);
    expect(piece).toEqual({ hashes: chain('a', 3), firstBlock: 0, blockIds: [1, 2, 3] });
    expect(pool.take([3, 2, 1])).toEqual([]);
    expect(pool.take([4])).toEqual([{ hashes: chain('a', 4).subarray(2 * hashBytes), firstBlock: 1, blockIds: [4] }]);
  });

  it('is nothing while nothing is reused soon and nothing was hit', () => {
    const pool = new Pool();
    pool.fill('a', [1, 2, 3]);
    expect(pool.take([])).toEqual([]);
  });

  it('is what was hit twice, as one piece', () => {
    const pool = new Pool();
    pool.fill('a', [1, 2, 3]);
    pool.fill('a', [1, 2]);
    expect(pool.take([])).toEqual([]);
    pool.fill('a', [1, 2]);
    expect(idsOf(pool.take([]))).toEqual([[1, 2]]);
    pool.fill('a', [1]); // the tier may have lost it since
    expect(idsOf(pool.take([]))).toEqual([[1]]);
  });

  it('fits the room, its beginning first, and the rest comes next', () => {
    const pool = new Pool();
    pool.fill('a', [1, 2, 3, 4, 5]);
    expect(idsOf(pool.take([5, 4], 2))).toEqual([[1, 2]]);
    expect(idsOf(pool.take([5, 4], 2))).toEqual([[3, 4]]);
    expect(idsOf(pool.take([5, 4], 2))).toEqual([[5]]);
    expect(pool.take([5, 4], 0)).toEqual([]);
  });

  it('is never what a block held before', () => {
    const pool = new Pool();
    pool.fill('a', [1, 2, 3]);
    pool.cached.delete(2); // reused, not full yet
    expect(idsOf(pool.take([2]))).toEqual([]);
    expect(idsOf(pool.take([3]))).toEqual([[3]]); // its parent is not there to go with it
    pool.fill('b', [2]);
    expect(pool.policy.lostBlocks).toBe(1);
    expect(pool.take([2])).toEqual([{ hashes: chain('b', 1), firstBlock: 0, blockIds: [2] }]);
  });

  /** Chains in random blocks, reused at random: against a model that knows what each block holds and what has gone. */
  it('is cached, complete up to its root, within its room, and once per use', () => {
    const action = fc.oneof(
      fc.record({
        kind: fc.constant('fill' as const),
        name: fc.constantFrom('a', 'b', 'c'),
        blocks: fc.uniqueArray(fc.integer({ min: 1, max: 11 }), { minLength: 1, maxLength: 5 }),
      }),
      fc.record({ kind: fc.constant('reuse' as const), block: fc.integer({ min: 1, max: 11 }) }),
      fc.record({
        kind: fc.constant('take' as const),
        soon: fc.uniqueArray(fc.integer({ min: 1, max: 11 }), { maxLength: 6 }),
        room: fc.nat({ max: 6 }),
      }),
    );
    fc.assert(
      fc.property(fc.array(action, { maxLength: 40 }), (actions) => {
        const pool = new Pool();
        const due = new Set<number>(); // filled since it last went
        for (const one of actions) {
          if (one.kind === 'fill') {
            pool.fill(one.name, one.blocks);
            for (const block of one.blocks) due.add(block);
          } else if (one.kind === 'reuse') {
            pool.cached.delete(one.block);
          } else {
            const before = new Set([...due].filter((block) => pool.cached.has(block)));
            const went = pool.take(one.soon, one.room).flatMap(({ blockIds }) => blockIds);
            expect(new Set(went).size).toBe(went.length);
            expect(went.length).toBeLessThanOrEqual(one.room);
            for (const block of went) {
              expect(before.has(block)).toBe(true);
              due.delete(block);
            }
            // Whoever is reused soon has gone, unless the room was too small.
            if (went.length < one.room)
              for (const block of one.soon) expect(due.has(block) && pool.cached.has(block)).toBe(false);
          }
        }
      }),
      { numRuns: 500 },
    );
  });
});

describe('while nobody takes', () => {
  it('what was proven is remembered once per block, however often it is hit', { timeout: 20_000 }, () => {
    const blocks = Array.from({ length: 6_250 }, (_, i) => i + 1);
    const packed = chain('a', blocks.length);
    const policy = new WriteDownAhead(6_251, hashBytes, () => true);
    for (let i = 0; i < 10; i++) policy.computed(packed, blocks, 0, blocks.length);
    const before = usedBytes();
    for (let i = 0; i < 200; i++) policy.computed(packed, blocks, 0, blocks.length);
    expect(usedBytes() - before).toBeLessThan(2e6); // 11 bytes per block and hit would be 14 MB
    expect(idsOf(policy.takeDue([], 10_000))).toEqual([blocks]);
    expect(policy.takeDue([], 10_000)).toEqual([]);
  });

  it('a block that was proven and is another one by now does not go for what it was', () => {
    const pool = new Pool();
    for (let i = 0; i < 3; i++) pool.fill('a', [1, 2]);
    pool.fill('b', [2]);
    expect(idsOf(pool.take([]))).toEqual([[1]]);
    for (let i = 0; i < 2; i++) pool.fill('b', [2]);
    expect(idsOf(pool.take([]))).toEqual([[2]]);
  });

  /** The same, told to a model that keeps every hit in a list, as long as it grows. */
  it('the same blocks are due as if every hit had been kept', () => {
    const fill = fc.record({
      name: fc.constantFrom('a', 'b'),
      start: fc.integer({ min: 1, max: 3 }),
      count: fc.integer({ min: 1, max: 6 }),
    });
    fc.assert(
      fc.property(fc.array(fill, { maxLength: 60 }), (fills) => {
        const pool = new Pool();
        const hits = new Map<string, number>(); // by block and content
        for (const { name, start, count } of fills) {
          const blocks = Array.from({ length: count }, (_, i) => start + i);
          const packed = chain(name, count);
          blocks.forEach((block, i) => {
            const key = `${block} ${hashAt(packed, i)}`;
            for (const other of hits.keys()) if (other.startsWith(`${block} `) && other !== key) hits.delete(other);
            hits.set(key, (hits.get(key) ?? -1) + 1);
          });
          pool.fill(name, blocks);
        }
        const proven = [...hits].filter(([, count]) => count >= 2).map(([key]) => Number(key.split(' ')[0]));
        const went = new Set(idsOf(pool.take([])).flat());
        for (const block of proven) expect(went).toContain(block);
      }),
      { numRuns: 300 },
    );
  });
});

describe('an engine that writes down ahead', () => {
  const prompts = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9];

  /** Ten prompts of five blocks, one after another, through a pool of sixteen blocks. */
  async function serveAll(rig: SchedulerRig): Promise<void> {
    for (const which of prompts) {
      expect(await rig.generate(`r${which}`, prompt(which, 20))).toEqual(naiveAnswer(prompt(which, 20), 4));
    }
  }

  it('stores what the pool lets go of, before it does', async () => {
    const rig = new SchedulerRig({ blockCount: 17, writeDownAheadBlocks: 6 });
    await serveAll(rig);
    await rig.drain();
    const { exportedBlocks, skippedExportBlocks, exportBlocks, loadedTokens } = rig.engine.stats();
    expect([skippedExportBlocks, exportBlocks, loadedTokens]).toEqual([0, 0, 0]);
    expect(exportedBlocks).toBeLessThan(50); // what is still in the pool, and not next, has not gone
    expect(rig.connector.tier.size).toBe(exportedBlocks);
    // The first prompt has left the pool long ago; the tier brings it back.
    expect(await rig.generate('again', prompt(0, 20))).toEqual(naiveAnswer(prompt(0, 20), 4));
    expect(rig.last('again').finishReason).toBe('length');
    expect(rig.engine.stats().loadedTokens).toBe(20);
  });

  it('stores nothing as long as the pool holds everything', async () => {
    const rig = new SchedulerRig({ blockCount: 200, writeDownAheadBlocks: 6 });
    await serveAll(rig);
    await rig.drain();
    expect(rig.engine.stats().exportedBlocks).toBe(0);
  });

  it('stores what is hit twice', async () => {
    const rig = new SchedulerRig({ blockCount: 200, writeDownAheadBlocks: 6 });
    for (const id of ['a', 'b', 'c']) await rig.generate(id, prompt(1, 20));
    await rig.drain();
    expect(rig.engine.stats().exportedBlocks).toBe(4);
  });

  it.each([undefined, 6, 1000])(
    'makes no allocation wait for a copy, even if none ever ends (ahead %s)',
    async (writeDownAheadBlocks) => {
      const alone = new SchedulerRig({ blockCount: 17, attached: false });
      await serveAll(alone);
      const rig = new SchedulerRig({ blockCount: 17, writeDownAheadBlocks });
      const held: (() => void)[] = [];
      rig.connector.store = (_hashes, _first, _blocks, onReleased) => held.push(onReleased);
      await serveAll(rig);
      const { steps, preemptions, exportBlocks } = rig.engine.stats();
      expect({ steps, preemptions }).toEqual({ steps: alone.engine.stats().steps, preemptions: 0 });
      expect(exportBlocks).toBeGreaterThan(0);
      expect(exportBlocks).toBeLessThanOrEqual(8);
      for (const release of held.splice(0)) release();
      rig.engine.checkIntegrity();
      expect(rig.engine.stats()).toMatchObject({ exportBlocks: 0, freeBlocks: 16 });
    },
  );

  it('is refused where it cannot be', () => {
    expect(() => new SchedulerRig({ prefixCache: 'radix', writeDownAheadBlocks: 6 })).toThrow(
      'the radix tree cannot write down ahead',
    );
    expect(() => new SchedulerRig({ windows: [0, 8], writeDownAheadBlocks: 6 })).toThrow(
      'sliding windows cannot write down ahead',
    );
  });
});
