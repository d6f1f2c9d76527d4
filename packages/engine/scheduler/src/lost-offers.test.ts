/** What becomes of blocks whose offer to the tier was lost on its way: offered again, each counted once. */
import { KvError } from '@kvtier/errors';
import { describe, expect, it } from 'vitest';
import type { StoreOptions } from './connector.ts';
import { prompt, type RigOptions, SchedulerRig } from './testing/rig.ts';

describe('an offer that was lost on its way', () => {
  /** The first offers are lost, so many of them, and so many after these busy; what follows is refused until its parent is there. */
  function losing(lost: number, busy = 0) {
    const rig = new SchedulerRig({ blockCount: 64, limits: { exportGatherBlocks: 1 } });
    const offers: number[] = [];
    let held = 0;
    rig.connector.store = (_hashes, first, blocks, onReleased, { onSettled } = {}) => {
      offers.push(first);
      const isLost = offers.length <= lost;
      const isBusy = offers.length <= lost + busy;
      const taken = !isBusy && first <= held ? blocks.length : 0;
      if (taken > 0) held = Math.max(held, first + taken);
      rig.world.later(() => {
        onReleased();
        onSettled?.(taken, isBusy, isLost);
      });
    };
    return { rig, offers, held: () => held };
  }

  it.each([
    [1, 0],
    [3, 0],
    [1, 2],
  ])(
    'is made again, with all behind it, while its blocks are there: %i of them, and %i were busy then',
    async (lost, busy) => {
      const { rig, offers, held } = losing(lost, busy);
      await rig.generate('a', prompt(1, 40), { maxTokens: 8 });
      await rig.drain();
      expect(held()).toBe(11);
      expect(offers.filter((first) => first === 0)).toHaveLength(1 + lost + busy);
      expect(rig.engine.stats().exportedBlocks).toBe(11);
    },
  );

  it('is made no more than three times again', async () => {
    const { rig, offers, held } = losing(Number.POSITIVE_INFINITY);
    await rig.generate('a', prompt(1, 40), { maxTokens: 24 });
    await rig.drain();
    expect(held()).toBe(0);
    expect(offers.filter((first) => first === 0)).toHaveLength(4);
    expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 0, exportBlocks: 0 });
  });

  it('by one that computes for another worker is made again, and nothing of it is missing', async () => {
    const { rig, held } = losing(1);
    rig.submit('a', prompt(1, 48), { prefillOnly: { blocks: 12 } });
    await rig.world.until(() => rig.ended('a'));
    expect(rig.last('a')).toMatchObject({ finishReason: 'prefilled', handOff: { readyBlocks: 12 } });
    expect(held()).toBe(12);
    await rig.drain();
    expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 12, skippedExportBlocks: 0, exportBlocks: 0 });
  });

  it('by one that computes for another worker counts as skipped where it is made in vain', async () => {
    const { rig, held } = losing(Number.POSITIVE_INFINITY);
    rig.submit('a', prompt(1, 48), { prefillOnly: { blocks: 12 } });
    await rig.world.until(() => rig.ended('a'));
    expect(rig.last('a')).toMatchObject({ finishReason: 'prefilled', handOff: { readyBlocks: 0 } });
    expect(held()).toBe(0);
    await rig.drain();
    expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 0, skippedExportBlocks: 12, exportBlocks: 0 });
  });

  /** Whose offers are answered when the test says so. */
  function awaiting(options: RigOptions = {}) {
    const rig = new SchedulerRig({ blockCount: 64, ...options, limits: { exportGatherBlocks: 1 } });
    const open: { chain: string; first: number; count: number; onSettled: StoreOptions['onSettled'] }[] = [];
    rig.connector.store = (hashes, first, { length }, onReleased, { onSettled } = {}) => {
      const count = length / (options.windows?.length ?? 1);
      open.push({ chain: hashes.toString('latin1', 0, rig.hasher.hashBytes), first, count, onSettled });
      rig.connector.storeRoom -= length;
      rig.world.later(onReleased);
    };
    const offers = (count: number) => rig.world.until(() => open.length === count);
    /** The next one; `held` undefined: it is lost. */
    const answer = (held?: number): number[] => {
      const { first, count, onSettled } = open.shift()!;
      const isLost = held === undefined;
      rig.connector.storeRoom += count;
      onSettled?.(Math.min(held ?? 0, count), isLost, isLost);
      return [first, first + count];
    };
    return { rig, offers, answer, open };
  }

  it('by one that computes for another worker counts once, though what lies behind it was held before', async () => {
    const { rig, offers, answer } = awaiting();
    rig.submit('a', prompt(1, 48), { prefillOnly: { blocks: 12 } });
    await offers(3);
    for (const held of [undefined, 4, 4]) answer(held);
    await offers(1);
    expect(answer(12)).toEqual([0, 12]);
    await rig.world.until(() => rig.ended('a'));
    expect(rig.last('a')).toMatchObject({ finishReason: 'prefilled', handOff: { readyBlocks: 12 } });
    await rig.drain();
    expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 12, skippedExportBlocks: 0, exportBlocks: 0 });
  });

  it('with others behind it is one outage: three of these it may meet', async () => {
    const { rig, offers, answer, open } = awaiting();
    const lose = (count: number) => Array.from({ length: count }, () => answer());
    rig.submit('a', prompt(1, 40), { maxTokens: 40 });
    await offers(3);
    expect(lose(3)).toEqual([
      [0, 4],
      [4, 8],
      [8, 10],
    ]);
    for (const end of [10, 11]) {
      await offers(2);
      expect(lose(2)).toEqual([
        [0, end],
        [end, end + 1],
      ]);
    }
    await offers(1);
    expect(answer(12)).toEqual([0, 12]);
    await offers(7);
    expect(open.map(({ first }) => first)).toEqual([12, 13, 14, 15, 16, 17, 18]);
    for (let i = 0; i < 7; i++) answer(1);
    await rig.drain();
    expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 19, skippedExportBlocks: 0, exportBlocks: 0 });
  });

  it('takes back what lies behind it once, though that is lost, or refused, later', async () => {
    const { rig, offers, answer, open } = awaiting();
    rig.submit('a', prompt(1, 40), { maxTokens: 10 });
    await offers(3);
    answer();
    await offers(3);
    expect(open.map(({ first }) => first)).toEqual([4, 8, 0]);
    answer();
    answer(0);
    await offers(3);
    expect([answer(10), answer(1), answer(1)]).toEqual([
      [0, 10],
      [10, 11],
      [11, 12],
    ]);
    await rig.drain();
    expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 12, skippedExportBlocks: 0, exportBlocks: 0 });
  });

  it('takes back what lies before what was taken back already, too', async () => {
    const { rig, offers, answer, open } = awaiting();
    rig.submit('a', prompt(1, 40), { maxTokens: 16 });
    await offers(3);
    open.reverse();
    answer();
    await offers(3);
    expect(open.map(({ first }) => first)).toEqual([4, 0, 8]);
    answer();
    answer();
    await offers(2);
    expect(open.map(({ first }) => first)).toEqual([8, 0]);
    for (const left = [10, 12]; left.length > 0; ) answer(left.shift());
    await rig.world.until(() => rig.ended('a'));
    while (open.length > 0) answer(10);
    await rig.drain();
    // 55 of its tokens were computed.
    expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 13, skippedExportBlocks: 0, exportBlocks: 0 });
  });

  it('counts once, though what lies behind it was held before it was lost itself', async () => {
    const { rig, offers, answer, open } = awaiting();
    rig.submit('a', prompt(1, 40), { maxTokens: 9 });
    await offers(3);
    const [first] = open.splice(0, 1);
    answer(); // [4, 8)
    await offers(2);
    expect([answer(0), answer(6)]).toEqual([
      [8, 10],
      [4, 10],
    ]);
    open.unshift(first!);
    answer();
    await offers(1);
    expect(answer(10)).toEqual([0, 10]);
    await rig.world.until(() => rig.ended('a') && rig.world.pendingCount === 0);
    while (open.length > 0) answer(1);
    await rig.drain();
    // 48 of its tokens were computed.
    expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 12, skippedExportBlocks: 0, exportBlocks: 0 });
  });

  it('counts once, though what lies behind it was refused before it was lost itself', async () => {
    const { rig, offers, answer, open } = awaiting();
    rig.submit('a', prompt(1, 40), { maxTokens: 2 });
    await offers(3);
    const [first] = open.splice(0, 1);
    expect([answer(0), answer(1)]).toEqual([
      [4, 8],
      [8, 10],
    ]);
    open.unshift(first!);
    answer();
    await offers(1);
    expect(answer(9)).toEqual([0, 10]);
    await rig.drain();
    expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 9, skippedExportBlocks: 1, exportBlocks: 0 });
  });

  it('says nothing of later blocks: these are not skipped where the tier is gone when they are computed', async () => {
    const { rig, offers, answer } = awaiting();
    rig.submit('a', prompt(1, 40), { maxTokens: 90 });
    await offers(3);
    answer();
    await offers(3);
    for (let i = 0; i < 3; i++) answer(10);
    rig.connector.attached = false;
    await rig.world.until(() => rig.ended('a'));
    expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 10, skippedExportBlocks: 0 });
  });

  it('counts as skipped where the tier is gone before it is made again', async () => {
    const { rig, offers, answer } = awaiting();
    rig.submit('a', prompt(1, 40), { maxTokens: 8 });
    await offers(2);
    answer();
    answer(0);
    rig.connector.attached = false;
    await rig.world.until(() => rig.ended('a'));
    // The others were never offered: there was no tier.
    expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 0, skippedExportBlocks: 8 });
    await rig.generate('b', prompt(2, 40));
    await rig.drain();
    expect(rig.engine.stats()).toMatchObject({ skippedExportBlocks: 8, exportBlocks: 0 });
  });

  describe('when its request has ended', () => {
    /** Ten blocks, offered in three, which nobody has answered yet. */
    async function ended(options: RigOptions = {}) {
      const one = awaiting(options);
      one.rig.submit('a', prompt(1, 41), { maxTokens: 1 });
      await one.rig.world.until(() => one.rig.ended('a') && one.rig.world.pendingCount === 0);
      expect(one.open).toHaveLength(3);
      return one;
    }

    it.each([{}, { prefixCache: 'radix' }, { windows: [0, 12] }] satisfies RigOptions[])(
      'is made again, of the blocks that are found still: %j',
      async (options) => {
        const { rig, offers, answer, open } = await ended(options);
        answer();
        await offers(3);
        expect(open.map(({ first }) => first)).toEqual([4, 8, 0]);
        answer();
        answer(0);
        expect(answer(10)).toEqual([0, 10]);
        await rig.drain();
        const blocks = options.windows ? 10 + 3 : 10;
        expect(rig.engine.stats()).toMatchObject({ exportedBlocks: blocks, skippedExportBlocks: 0, exportBlocks: 0 });
        rig.engine.checkIntegrity();
      },
    );

    it('is made three times again, each time behind a longer pause', async () => {
      const { rig, offers, answer } = await ended();
      for (let i = 0; i < 3; i++) answer();
      for (const pauseMs of [10, 50, 250]) {
        const lostUs = rig.world.clock.nowUs();
        await offers(1);
        expect(Math.floor((rig.world.clock.nowUs() - lostUs) / 1_000)).toBe(pauseMs);
        expect(answer()).toEqual([0, 10]);
      }
      await rig.drain();
      expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 0, skippedExportBlocks: 10, exportBlocks: 0 });
    });

    it('keeps the cache from being reset until it is made again, though nothing holds its blocks meanwhile', async () => {
      const { rig, offers, answer } = await ended();
      for (let i = 0; i < 3; i++) answer();
      expect(rig.engine.stats().exportBlocks).toBe(0);
      expect(rig.engine.resetPrefixCache()).toBe(false);
      await offers(1);
      expect(answer(10)).toEqual([0, 10]);
      await rig.drain();
      expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 10, skippedExportBlocks: 0, exportBlocks: 0 });
      expect(rig.engine.resetPrefixCache()).toBe(true);
    });

    it('is made again as far as its blocks are there, and the rest is skipped', async () => {
      const { rig, offers, answer } = await ended({ blockCount: 15 });
      await rig.generate('b', prompt(2, 20), { maxTokens: 1 }); // takes three of them, from the last one on
      answer();
      await offers(5);
      expect([answer(0), answer(0), answer(4), answer(1)]).toEqual([
        [4, 8],
        [8, 10],
        [0, 4],
        [4, 5],
      ]);
      expect(answer(7)).toEqual([0, 7]);
      await rig.drain();
      expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 12, skippedExportBlocks: 3, exportBlocks: 0 });
    });

    it.each([
      [40, [4, 8, 12, 16, 20, 24, 28, 32, 36, 40]],
      [46, [8, 16, 24, 32, 40]],
      [48, [12, 24, 36, 40]],
    ])(
      'is made again piece by piece where the connector has room for %i blocks, and nothing is given up',
      async (room, ends) => {
        const { rig, answer, open } = awaiting({ blockCount: 128 });
        rig.connector.storeRoom = room;
        rig.submit('a', prompt(1, 161), { maxTokens: 1 });
        await rig.world.until(() => rig.ended('a') && rig.world.pendingCount === 0);
        expect(open).toHaveLength(10);
        for (let lost = 0; lost < 10; lost++) {
          answer();
          await rig.drain();
        }
        expect(open.map(({ first, count }) => first + count)).toEqual(ends);
        while (open.length > 0) answer(40);
        await rig.drain();
        expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 40, skippedExportBlocks: 0, exportBlocks: 0 });
      },
    );

    it('is skipped where its blocks are gone, or the engine ends', async () => {
      const { rig, answer, open } = await ended();
      rig.engine.resetPrefixCache();
      answer();
      await rig.drain();
      expect(open).toHaveLength(2);
      expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 0, skippedExportBlocks: 4 });
      answer(0);
      answer(0);
      await rig.generate('b', prompt(1, 41), { maxTokens: 1 });
      await rig.world.until(() => rig.world.pendingCount === 0);
      const closed = rig.engine.close();
      await new Promise(setImmediate);
      answer();
      await closed;
      expect(open).toHaveLength(2);
      expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 0, skippedExportBlocks: 14, exportBlocks: 0 });
    });
  });

  it('counts as skipped where its request has begun anew, and offers what it has then for itself', async () => {
    const { rig, offers, answer, open } = awaiting({ blockCount: 17 });
    rig.submit('a', prompt(1, 20), { maxTokens: 40 });
    await offers(1);
    rig.submit('b', prompt(2, 16), { maxTokens: 40 });
    await rig.world.until(() => rig.engine.stats().preemptions === 1);
    const [a] = open;
    const ofA = open.filter(({ chain }) => chain === a!.chain);
    const ofB = open.filter(({ chain }) => chain !== a!.chain);
    const lost = ofB.reduce((sum, { count }) => sum + count, 0);
    expect(lost).toBeGreaterThan(4);
    const before = rig.engine.stats().skippedExportBlocks;
    open.splice(0, open.length, ...ofB);
    while (open.length > 0) answer();
    expect(rig.engine.stats().skippedExportBlocks - before).toBe(lost);
    rig.engine.abort('b');
    open.push(...ofA);
    while (!rig.ended('a') || open.length > 0) {
      while (open.length > 0) answer(40);
      await rig.world.advance();
    }
    await rig.drain();
    expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 14, skippedExportBlocks: before + lost });
  });

  it('is not made again where the engine has ended by a defect', async () => {
    let fails = false;
    const { rig, answer, open } = awaiting({ stepFailure: () => (fails ? new KvError('GPU', 'gone') : undefined) });
    rig.submit('a', prompt(1, 41), { maxTokens: 1 });
    await rig.world.until(() => rig.ended('a') && rig.world.pendingCount === 0);
    fails = true;
    rig.submit('b', prompt(2, 8));
    await rig.world.until(() => rig.ended('b'));
    answer();
    await rig.drain();
    expect(rig.engine.stats()).toMatchObject({ skippedExportBlocks: 4, exportBlocks: 0 });
    await rig.engine.close();
    expect(open).toHaveLength(2);
  });

  it('is not made again where it was only busy: somebody else writes it', async () => {
    const { rig, offers } = losing(0, 1);
    await rig.generate('a', prompt(1, 40), { maxTokens: 8 });
    await rig.drain();
    expect(offers.filter((first) => first === 0)).toHaveLength(1);
  });
});
