/** When blocks of a prompt are offered to the tier. */
import { describe, expect, it } from 'vitest';
import type { StoreOptions } from './connector.ts';
import { prompt, type RigOptions, SchedulerRig } from './testing/rig.ts';

describe('blocks of a prompt', () => {
  /** What was offered: [first block, blocks] of each store. */
  function watched(exportGatherBlocks: number, blockCount = 64): { rig: SchedulerRig; offers: [number, number][] } {
    const rig = new SchedulerRig({ blockCount, limits: { exportGatherBlocks } });
    const offers: [number, number][] = [];
    rig.connector.store = (_hashes, first, blocks, onReleased, options) => {
      offers.push([first, blocks.length]);
      rig.world.later(() => {
        onReleased();
        options?.onSettled?.(blocks.length, false);
      });
    };
    return { rig, offers };
  }

  it.each([
    [
      1,
      [
        [0, 4],
        [4, 4],
        [8, 2],
      ],
    ],
    [
      6,
      [
        [0, 8],
        [8, 2],
      ],
    ],
    [100, [[0, 10]]],
  ])('are exported %i at a time, in chunks of 4, and the rest with its first token', async (gather, expected) => {
    const { rig, offers } = watched(gather);
    await rig.generate('a', prompt(1, 40));
    await rig.drain();
    expect(offers).toEqual(expected);
  });

  it('have their tokens at hand, where their names depend on tokens alone', async () => {
    const rig = new SchedulerRig({ blockCount: 64, limits: { exportGatherBlocks: 1 } });
    const told: (number[] | undefined)[] = [];
    rig.connector.store = (_hashes, first, blocks, onReleased, options) => {
      const said = options?.tokens?.(first, first + blocks.length);
      told.push(said && [...said]);
      rig.world.later(onReleased);
    };
    await rig.generate('a', prompt(1, 40));
    await rig.drain();
    expect(told.flat()).toEqual(prompt(1, 40));
    told.length = 0;
    await rig.generate('b', prompt(2, 40), { cacheSalt: 'x' });
    await rig.drain();
    expect(told).toEqual([undefined, undefined, undefined]);
  });

  it('wait for no more than half of what exports may hold', async () => {
    const { rig, offers } = watched(100, 32); // exports may hold 15
    await rig.generate('a', prompt(1, 40));
    await rig.drain();
    expect(offers).toEqual([
      [0, 8],
      [8, 2],
    ]);
  });

  it('that several requests share count once of what exports may hold: each one’s last block goes out, too', async () => {
    const rig = new SchedulerRig({ blockCount: 32, limits: { exportGatherBlocks: 100 } }); // exports may hold 15
    const offers: number[] = [];
    const releases: (() => void)[] = [];
    rig.connector.store = (_hashes, first, blocks, onReleased, options) => {
      offers.push(first + blocks.length);
      releases.push(() => {
        onReleased();
        options?.onSettled?.(blocks.length, false);
      });
    };
    const shared = prompt(1, 32);
    for (let i = 0; i < 5; i++) await rig.generate(`r${i}`, [...shared, ...prompt(2 + i, 4)]);
    // The first one's own in two parts: no more than half of the room at a time is waited for.
    expect(offers).toEqual([8, 9, 9, 9, 9, 9]);
    expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 0, skippedExportBlocks: 0, exportBlocks: 13 });
    const last = releases.pop()!;
    for (const release of releases) release();
    expect(rig.engine.stats().exportBlocks).toBe(9);
    last();
    expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 45, skippedExportBlocks: 0, exportBlocks: 0 });
    await rig.drain();
  });

  it.each([
    [7, false, 7, 3],
    [7, true, 7, 0], // somebody else is writing them
    [0, false, 0, 10],
  ])('count as the tier answers: %i held, and busy %s', async (held, isBusy, exported, skipped) => {
    const rig = new SchedulerRig({ blockCount: 64 });
    rig.connector.store = (_hashes, _first, _blocks, onReleased, options) =>
      rig.world.later(() => {
        onReleased();
        options?.onSettled?.(held, isBusy);
      });
    await rig.generate('a', prompt(1, 40));
    await rig.drain();
    expect(rig.engine.stats()).toMatchObject({ exportedBlocks: exported, skippedExportBlocks: skipped });
  });

  /** Whose connector has room for three blocks; `ends`: the block behind each piece, `rooms`: what was left of the room then. */
  function narrow(options: RigOptions): { rig: SchedulerRig; ends: number[]; rooms: number[] } {
    const rig = new SchedulerRig({ blockCount: 64, ...options });
    const { connector } = rig;
    const [ends, rooms]: [number[], number[]] = [[], []];
    connector.storeRoom = 3;
    connector.store = (_hashes, first, { length }, onReleased, options) => {
      connector.storeRoom -= length;
      connector.storingBlocks += length;
      rooms.push(connector.storeRoom);
      ends.push(first + length);
      rig.world.later(() => {
        onReleased();
        rig.world.later(() => {
          connector.storeRoom += length;
          connector.storingBlocks -= length;
          options?.onSettled?.(length, false);
        });
      });
    };
    return { rig, ends, rooms };
  }

  it('that the connector has no room for wait, and none is left out', async () => {
    const { rig, ends, rooms } = narrow({ limits: { exportGatherBlocks: 1 } });
    await rig.generate('a', prompt(1, 40), { maxTokens: 24 });
    await rig.drain();
    expect(ends.at(-1)).toBe(15); // 63 tokens: the last one is not computed any more
    expect(Math.min(...rooms)).toBe(0);
    expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 15, skippedExportBlocks: 0 });
  });

  it('for another worker wait for that room, too', async () => {
    const { rig, rooms } = narrow({});
    const ids = ['a', 'b', 'c'];
    for (const [which, id] of ids.entries())
      rig.submit(id, prompt(which, 40), { prefillOnly: { blocks: 10 }, maxTokens: 0 });
    await rig.world.until(() => rig.allEnded());
    for (const id of ids)
      expect(rig.last(id)).toMatchObject({ finishReason: 'prefilled', handOff: { readyBlocks: 10 } });
    expect(Math.min(...rooms)).toBe(0);
  });

  it('that go down ahead keep to that room, too', async () => {
    const { rig, rooms } = narrow({ writeDownAheadBlocks: 1000 });
    for (const id of ['a', 'b', 'c', 'd', 'e', 'f']) await rig.generate(id, prompt(1, 40));
    await rig.drain();
    expect(Math.min(...rooms)).toBe(0);
  });

  it('that go down ahead wait for that room: all that are due go, though no request comes', async () => {
    const { rig, rooms } = narrow({ writeDownAheadBlocks: 1000 });
    await rig.generate('a', prompt(1, 40));
    await rig.drain();
    expect(Math.min(...rooms)).toBe(0);
    expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 10, skippedExportBlocks: 0 });
  });

  it('go out too when the request ends before its first token', async () => {
    const { rig, offers } = watched(100);
    rig.submit('a', prompt(1, 40));
    await rig.world.until(() => rig.executor.steps.length === 2);
    rig.engine.abort('a');
    await rig.drain();
    expect(offers).toEqual([[0, 8]]);
    expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 8, skippedExportBlocks: 0, exportBlocks: 0 });
  });
});

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
  });

  /** Whose offers are answered when the test says so. */
  function awaiting(options: RigOptions = {}) {
    const rig = new SchedulerRig({ blockCount: 64, ...options, limits: { exportGatherBlocks: 1 } });
    const open: { first: number; count: number; onSettled: StoreOptions['onSettled'] }[] = [];
    rig.connector.store = (_hashes, first, { length }, onReleased, { onSettled } = {}) => {
      const count = length / (options.windows?.length ?? 1);
      open.push({ first, count, onSettled });
      rig.world.later(onReleased);
    };
    const offers = (count: number) => rig.world.until(() => open.length === count);
    /** The next one; `held` undefined: it is lost. */
    const answer = (held?: number): number[] => {
      const { first, count, onSettled } = open.shift()!;
      const isLost = held === undefined;
      onSettled?.(Math.min(held ?? 0, count), isLost, isLost);
      return [first, first + count];
    };
    return { rig, offers, answer, open };
  }

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

    it('is made three times again', async () => {
      const { rig, offers, answer } = await ended();
      for (let i = 0; i < 3; i++) answer();
      for (let again = 1; again <= 3; again++) {
        await offers(1);
        expect(answer()).toEqual([0, 10]);
      }
      await rig.drain();
      expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 0, skippedExportBlocks: 10, exportBlocks: 0 });
    });

    it('is made again as far as its blocks are there, and the rest is skipped', async () => {
      const { rig, offers, answer } = await ended({ blockCount: 15 });
      await rig.generate('b', prompt(2, 20), { maxTokens: 1 }); // takes four of them, from the last one on
      answer();
      await offers(5);
      expect([answer(0), answer(0), answer(4), answer(1)]).toEqual([
        [4, 8],
        [8, 10],
        [0, 4],
        [4, 5],
      ]);
      expect(answer(6)).toEqual([0, 6]);
      await rig.drain();
      expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 11, skippedExportBlocks: 4, exportBlocks: 0 });
    });

    it('is skipped where its blocks are gone, or the engine ends', async () => {
      const { rig, answer, open } = await ended();
      rig.engine.resetPrefixCache();
      answer();
      await rig.world.until(() => rig.world.pendingCount === 0);
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

  it('is not made again where it was only busy: somebody else writes it', async () => {
    const { rig, offers } = losing(0, 1);
    await rig.generate('a', prompt(1, 40), { maxTokens: 8 });
    await rig.drain();
    expect(offers.filter((first) => first === 0)).toHaveLength(1);
  });
});
