/** When blocks of a prompt are offered to the tier. */
import { describe, expect, it } from 'vitest';
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
