/** When blocks of a prompt are offered to the tier. */
import { describe, expect, it } from 'vitest';
import { prompt, SchedulerRig } from './testing/rig.ts';

describe('blocks of a prompt', () => {
  /** What was offered: [first block, blocks] of each store. */
  function watched(exportGatherBlocks: number, blockCount = 64): { rig: SchedulerRig; offers: [number, number][] } {
    const rig = new SchedulerRig({ blockCount, limits: { exportGatherBlocks } });
    const offers: [number, number][] = [];
    rig.connector.store = (_hashes, first, blocks, onReleased) => {
      offers.push([first, blocks.length]);
      rig.world.later(onReleased);
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
    rig.connector.store = (_hashes, first, blocks, onReleased) => {
      offers.push(first + blocks.length);
      releases.push(onReleased);
    };
    const shared = prompt(1, 32);
    for (let i = 0; i < 5; i++) await rig.generate(`r${i}`, [...shared, ...prompt(2 + i, 4)]);
    // The first one's own in two parts: no more than half of the room at a time is waited for.
    expect(offers).toEqual([8, 9, 9, 9, 9, 9]);
    expect(rig.engine.stats()).toMatchObject({ exportedBlocks: 45, skippedExportBlocks: 0, exportBlocks: 13 });
    const last = releases.pop()!;
    for (const release of releases) release();
    expect(rig.engine.stats().exportBlocks).toBe(9);
    last();
    expect(rig.engine.stats().exportBlocks).toBe(0);
    await rig.drain();
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
