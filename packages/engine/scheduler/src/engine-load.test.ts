/** What an engine has to do, as it tells it: exact with chunks, hits, loads, aborts and preemption; rates as measured. */
import { describe, expect, it } from 'vitest';
import { EngineLoad } from './engine-load.ts';
import { prompt, SchedulerRig } from './testing/rig.ts';

/** Blocks of 4 tokens, 16 tokens a step, 4 requests at once. */
const counts = (rig: SchedulerRig) => {
  const { waiting, running, tokensAhead, usedBlocks, waitingBlocks } = rig.engine.load();
  return { waiting, running, tokensAhead, usedBlocks, waitingBlocks };
};
describe('tokens ahead', () => {
  it('are those that no step has computed yet, chunk by chunk', async () => {
    const rig = new SchedulerRig({ attached: false });
    const told: number[] = [];
    rig.submit('a', prompt(1, 41), { maxTokens: 3 });
    expect(counts(rig)).toEqual({ waiting: 1, running: 0, tokensAhead: 41, usedBlocks: 0, waitingBlocks: 11 });
    while (!rig.ended('a')) {
      const { tokensAhead } = rig.engine.load();
      if (told.at(-1) !== tokensAhead) told.push(tokensAhead);
      await rig.world.advance();
    }
    expect(told).toEqual([41, 25, 9, 0]);
    expect(counts(rig)).toEqual({ waiting: 0, running: 0, tokensAhead: 0, usedBlocks: 0, waitingBlocks: 0 });
  });

  it('go with the blocks of all attention groups that are needed for them', async () => {
    const rig = new SchedulerRig({ attached: false, blockCount: 64, windows: [0, 40, 40, 40] });
    rig.submit('a', prompt(1, 40), { maxTokens: 4 });
    expect(rig.engine.load()).toMatchObject({ usedBlocks: 0, waitingBlocks: 40 });
    let mostUsed = 0;
    while (!rig.ended('a')) {
      await rig.world.advance();
      mostUsed = Math.max(mostUsed, rig.engine.load().usedBlocks);
    }
    expect(mostUsed).toBe(44); // with its answer
    expect(rig.engine.load().waitingBlocks).toBe(0);
  });

  it('go with the blocks that let a request in, however long its answer may become', async () => {
    const rig = new SchedulerRig({ attached: false, blockCount: 64, maxModelTokens: 100_000 });
    rig.submit('a', prompt(1, 8), { maxTokens: 40 });
    await rig.world.until(() => rig.tokens('a').length > 2);
    rig.submit('b', prompt(2, 9), { maxTokens: 131_000 });
    expect(rig.engine.load()).toMatchObject({ waiting: 1, waitingBlocks: 3, totalBlocks: 63 });
    rig.submit('c', prompt(3, 8), { maxTokens: 16 });
    expect(rig.engine.load()).toMatchObject({ waiting: 2, waitingBlocks: 5 });
  });

  it('leave out what is cached, and count of a prompt that is cached whole its last block', async () => {
    const rig = new SchedulerRig({ attached: false });
    await rig.generate('a', prompt(1, 20));
    rig.submit('b', prompt(1, 30));
    expect(rig.engine.load().tokensAhead).toBe(10);
    rig.submit('c', prompt(1, 20));
    expect(rig.engine.load().tokensAhead).toBe(10 + 4);
    rig.engine.abort('b');
    expect(rig.engine.load().tokensAhead).toBe(4);
    expect(rig.engine.load().waiting).toBe(1);
  });

  it('leave out what is being loaded, and take back what did not come', async () => {
    const rig = new SchedulerRig({ faults: { shorten: () => 2 } });
    await rig.generate('a', prompt(1, 40));
    await rig.drain();
    expect(rig.engine.resetPrefixCache()).toBe(true);
    rig.submit('b', prompt(1, 40));
    expect(rig.engine.load()).toMatchObject({ tokensAhead: 40, loadAheadS: 0 });
    await rig.world.until(() => rig.engine.stats().loading === 1);
    expect(rig.engine.load()).toMatchObject({ tokensAhead: 1, waiting: 1 });
    await rig.world.until(() => rig.engine.stats().loading === 0);
    // Two blocks came.
    expect(rig.engine.load().tokensAhead).toBe(32);
    await rig.world.until(() => rig.ended('b'));
    await rig.drain();
    expect(rig.engine.load()).toMatchObject({ tokensAhead: 0, loadBlocksPerS: { arena: 2 / 5e-6 } });
  });

  it('of an aborted request are gone at once, also while a step computes it', async () => {
    const rig = new SchedulerRig({ attached: false });
    rig.submit('a', prompt(1, 41));
    rig.submit('b', prompt(2, 10));
    await rig.world.until(() => rig.executor.steps.length === 1);
    expect(rig.engine.load().tokensAhead).toBe(51);
    rig.engine.abort('a');
    expect(counts(rig)).toMatchObject({ waiting: 1, tokensAhead: 10 });
    await rig.world.until(() => rig.allEnded());
    expect(counts(rig)).toEqual({ waiting: 0, running: 0, tokensAhead: 0, usedBlocks: 0, waitingBlocks: 0 });
  });

  it('say what of them the step computes that runs, and for how long it has run', async () => {
    const rig = new SchedulerRig({ attached: false });
    const told: [tokensAhead: number, stepTokens: number][] = [];
    const step = () => {
      const { tokensAhead, stepTokens, stepForS } = rig.engine.load();
      return { tokensAhead, stepTokens, stepForS };
    };
    rig.submit('a', prompt(1, 41), { maxTokens: 3 });
    expect(step()).toEqual({ tokensAhead: 41, stepTokens: 0, stepForS: 0 });
    await rig.world.until(() => rig.executor.steps.length === 1);
    while (!rig.ended('a')) {
      const { tokensAhead, stepTokens } = step();
      if (stepTokens > 0 && told.at(-1)?.[0] !== tokensAhead) told.push([tokensAhead, stepTokens]);
      await rig.world.advance();
    }
    // The steps that give its answer have none of them.
    expect(told).toEqual([
      [41, 16],
      [25, 16],
      [9, 9],
    ]);
    expect(step()).toEqual({ tokensAhead: 0, stepTokens: 0, stepForS: 0 });
    const load = new EngineLoad(4);
    load.begun(16, 1_000_000);
    expect(load.figures(0, 10, 0, 1_250_000)).toMatchObject({ stepTokens: 0, stepForS: 0 }); // of an aborted request
    rig.submit('b', prompt(2, 30));
    await rig.world.until(() => rig.executor.steps.length === 6);
    const begun = rig.engine.load();
    rig.engine.abort('b');
    expect([begun.stepTokens, step().stepTokens]).toEqual([16, 0]);
    await rig.world.until(() => rig.allEnded());
  });

  it('of a preempted request are its tokens that are not cached, those of its answer too', async () => {
    const rig = new SchedulerRig({ attached: false, blockCount: 11, limits: { maxSequences: 2 } });
    rig.submit('a', prompt(1, 16), { maxTokens: 12 });
    rig.submit('b', prompt(2, 16), { maxTokens: 12 });
    await rig.world.until(() => rig.engine.stats().preemptions === 1);
    const given = rig.tokens('b').length;
    expect(given).toBeGreaterThan(0);
    const { waiting, running, tokensAhead, waitingBlocks } = rig.engine.load();
    expect({ waiting, running, waitingBlocks }).toEqual({ waiting: 0, running: 2, waitingBlocks: 5 }); // its prompt, and what it has given
    // Its prompt's blocks are cached still, and found when it is looked at again.
    expect(tokensAhead).toBe(given);
    await rig.world.until(() => rig.allEnded());
    expect(counts(rig)).toEqual({ waiting: 0, running: 0, tokensAhead: 0, usedBlocks: 0, waitingBlocks: 0 });
  });
});

describe('draining', () => {
  it('refuses what is new, and ends what is there', async () => {
    const rig = new SchedulerRig({ attached: false });
    rig.submit('a', prompt(1, 20));
    expect(rig.engine.drain()).toBe(1);
    expect(rig.engine.draining).toBe(true);
    expect(() => rig.submit('b', prompt(2, 20))).toThrow(
      expect.objectContaining({
        code: 'CANCELLED',
        retry: true,
        message: 'engine: is draining; send the request to another one',
      }),
    );
    await rig.world.until(() => rig.ended('a'));
    expect(rig.tokens('a')).toHaveLength(4);
    expect(rig.engine.requestCount).toBe(0);
  });
});

describe('rates', () => {
  const rates = (load: EngineLoad) => load.figures(0, 10, 0, 0);

  it('are 0 until something is measured', () => {
    const { prefillTokensPerS, stepS, stepPerRequestS, freedBlocksPerS, loadBlocksPerS, loadAheadS } = rates(
      new EngineLoad(4),
    );
    expect([prefillTokensPerS, stepS, stepPerRequestS, freedBlocksPerS, loadAheadS]).toEqual([0, 0, 0, 0, 0]);
    expect(loadBlocksPerS).toEqual({});
  });

  it('of steps are the line through those that only decode, and of prompts what these leave', () => {
    const load = new EngineLoad(4);
    for (let i = 0; i < 200; i++) load.step(0, 1 + (i % 8), 0.01 + 0.002 * (1 + (i % 8)));
    expect(rates(load).stepS).toBeCloseTo(0.01, 6);
    expect(rates(load).stepPerRequestS).toBeCloseTo(0.002, 6);
    // 512 tokens at 10,000 a second, while 5 decode.
    for (let i = 0; i < 50; i++) load.step(512, 5, 0.0512 + 0.02);
    expect(rates(load).prefillTokensPerS).toBeCloseTo(10_000, 3);
  });

  it('of prompts are not measured by what hits leave', () => {
    const load = new EngineLoad(16);
    for (let i = 0; i < 1_000; i++) load.step(1 + (i % 16), 0, 0.005);
    expect(rates(load).prefillTokensPerS).toBe(0);
    load.step(512, 0, 0.05);
    for (let i = 0; i < 1_000; i++) load.step(1, 0, 0.005);
    expect(rates(load).prefillTokensPerS).toBeCloseTo(10_240, 6);
    // Nor by a prompt that is computed block by block for another worker.
    for (let i = 0; i < 1_000; i++) load.step(16, 0, 0.005, 16_000 - 16 * i);
    expect(rates(load).prefillTokensPerS).toBeCloseTo(10_240, 6);
  });

  it('of prompts are measured where no step has more than a block, but for what hits leave', () => {
    const load = new EngineLoad(1_024, undefined, 1_024);
    for (let i = 0; i < 100; i++) load.step(512, 0, 0.005);
    expect(rates(load).prefillTokensPerS).toBe(0);
    for (let i = 0; i < 16; i++) load.step(1_024, 0, 0.1, 16_384 - 1_024 * i);
    expect(rates(load).prefillTokensPerS).toBeCloseTo(10_240, 6);
    for (let i = 0; i < 100; i++) load.step(512, 0, 0.005);
    expect(rates(load).prefillTokensPerS).toBeCloseTo(10_240, 6);
  });

  it('of prompts are measured by an engine whose steps have no more than a block', async () => {
    const rig = new SchedulerRig({ blockTokens: 16, limits: { maxStepTokens: 16 } });
    await rig.generate('a', prompt(1, 100), { maxTokens: 1 });
    expect(rig.engine.load().prefillTokensPerS).toBeGreaterThan(0);
  });

  it('of prompts are not measured by what hits leave beside streams', () => {
    const load = new EngineLoad(16);
    for (let i = 0; i < 100; i++) load.step(1 + (i % 16), 32, 0.02); // before anything is known of streams
    expect(rates(load).prefillTokensPerS).toBe(0);
    for (let i = 0; i < 100; i++) load.step(0, 32, 0.02);
    load.step(512, 0, 0.05);
    // Several at once, and a step that took longer for another reason, say no more.
    for (let i = 0; i < 4_000; i++) load.step(1 + (i % 48), 32, i % 10 === 0 ? 0.03 : 0.02, 1 + (i % 16));
    expect(rates(load).prefillTokensPerS).toBeCloseTo(10_240, 6);
  });

  it('of prompts are measured by one that gets a block of each step beside streams', () => {
    const load = new EngineLoad(16);
    for (let i = 0; i < 100; i++) load.step(0, 32, 0.02);
    for (let i = 0; i < 100; i++) load.step(16, 32, 0.03, 1_600 - 16 * i);
    expect(rates(load).prefillTokensPerS).toBeCloseTo(1_600, 6);
  });

  it('of steps that compute prompts alone are a start, too, once they were of several sizes', () => {
    const load = new EngineLoad(4);
    for (let i = 0; i < 20; i++) load.step(512, 0, 0.003 + 0.0512);
    expect(rates(load).prefillStepS).toBe(0);
    for (let i = 0; i < 60; i++) load.step(64 * (1 + (i % 8)), 0, 0.003 + 0.0064 * (1 + (i % 8)));
    expect(rates(load).prefillStepS).toBeCloseTo(0.003, 6);
    // Streams beside a prompt make a step longer, and say nothing of it.
    for (let i = 0; i < 20; i++) load.step(64 * (1 + (i % 8)), 3, 0.1);
    expect(rates(load).prefillStepS).toBeCloseTo(0.003, 6);
  });

  it('of steps that compute prompts are no less than a thirty-second of one, where their line begins below nothing', () => {
    const load = new EngineLoad(4);
    // Another process took a part of the larger ones.
    load.step(100, 0, 0.05);
    load.step(300, 0, 0.35);
    expect(rates(load).prefillStepS).toBeCloseTo((0.05 * 0.99 + 0.35) / 1.99 / 32, 6);
  });

  it('steps that were all of one size are a start without a slope', () => {
    const load = new EngineLoad(4);
    for (let i = 0; i < 100; i++) load.step(0, 3, 0.015);
    expect(rates(load).stepPerRequestS).toBe(0);
    expect(rates(load).stepS).toBeCloseTo(0.015, 9);
  });

  it('of a tier are what was expected of it where that was rather computed, and what it does once it is loaded from', () => {
    const load = new EngineLoad(4);
    load.passed({ peer: 10 }, 0.5);
    expect(rates(load).loadBlocksPerS).toEqual({ peer: 20 });
    expect(load.figures(0, 10, 5, 0).loadAheadS).toBe(0); // nothing was loaded
    load.loaded({ arena: 100 }, 0.1, 0);
    expect(rates(load).loadBlocksPerS.arena).toBeCloseTo(1_000, 6);
    expect(load.figures(0, 10, 5, 0).loadAheadS).toBeCloseTo(0.005, 6);
    // An expectation of a minute counts as one of a second, so that loads soon say more.
    load.passed({ disk: 60 }, 60);
    for (let i = 0; i < 40; i++) load.loaded({ disk: 100 }, 0.25, 0);
    expect(rates(load).loadBlocksPerS.disk).toBeGreaterThan(350);
  });

  it('follow what changes, within some ten seconds of measuring', () => {
    const load = new EngineLoad(4);
    for (let i = 0; i < 100; i++) load.step(1_000, 0, 0.1);
    for (let i = 0; i < 400; i++) load.step(500, 0, 0.1);
    expect(rates(load).prefillTokensPerS).toBeCloseTo(5_000, -3);
  });

  describe('of prompts, after a step of half a minute', () => {
    const long = (load: EngineLoad): void => load.step(2_000, 0, 30);
    const usual = (load: EngineLoad, steps: number): void => {
      for (let i = 0; i < steps; i++) load.step(2_000, 0, 0.1);
    };

    it('are about what they were, when it was the only one', () => {
      const load = new EngineLoad(16);
      usual(load, 200);
      long(load);
      expect(rates(load).prefillTokensPerS).toBeGreaterThan(17_000);
      usual(load, 1);
      long(load);
      expect(rates(load).prefillTokensPerS).toBeGreaterThan(15_000);
    });

    it('are soon the usual ones, when it was the first', () => {
      const load = new EngineLoad(16);
      long(load);
      expect(rates(load).prefillTokensPerS).toBeCloseTo(2_000 / 30, 6);
      usual(load, 20);
      expect(rates(load).prefillTokensPerS).toBeGreaterThan(13_000);
    });

    it('are as it says, when all are like it from now on', () => {
      const load = new EngineLoad(16);
      usual(load, 200);
      for (let i = 0; i < 3; i++) long(load);
      expect(rates(load).prefillTokensPerS).toBeLessThan(100);
    });

    it('are about what they were also behind a short step, which takes as long as its start does', () => {
      const load = new EngineLoad(16);
      for (let i = 0; i < 100; i++) {
        load.step(2_000, 0, 0.1);
        load.step(20, 0, 0.02);
      }
      long(load);
      expect(rates(load).prefillTokensPerS).toBeGreaterThan(14_000);
      expect(rates(load).prefillStepS).toBeCloseTo(0.02 - (20 * 0.08) / 1_980, 6);
    });
  });

  describe('of loads, after some that stood still', () => {
    const usual = (): EngineLoad => {
      const load = new EngineLoad(4);
      for (let i = 1; i <= 20; i++) load.loaded({ arena: 100 }, 0.01, i * 1e6);
      return load;
    };
    const perS = (load: EngineLoad): number => rates(load).loadBlocksPerS.arena!;

    it('are about what they were, however many were under way', () => {
      const load = usual();
      for (let i = 0; i < 3; i++) load.loaded({ arena: 100 }, 5, 30e6 + i);
      expect(perS(load)).toBeGreaterThan(8_000);
      expect(load.figures(0, 10, 100, 0).loadAheadS).toBeLessThan(0.0125);
      load.loaded({}, 5, 31e6);
      load.loaded({ arena: 1 }, 0.001, 32e6); // of one block: the way there and back
      load.loaded({ arena: 100 }, 5, 40e6);
      expect(perS(load)).toBeGreaterThan(7_000);
    });

    it('are as those of that tier say, however well others are', () => {
      const load = usual();
      for (let i = 1; i <= 20; i++) load.loaded({ peer: 100 }, 0.02, (20 + i) * 1e6);
      for (let i = 1; i <= 10; i++) {
        load.loaded({ peer: 100 }, 2, (50 + 10 * i) * 1e6);
        load.loaded({ arena: 100 }, 0.01, (51 + 10 * i) * 1e6);
      }
      expect(rates(load).loadBlocksPerS.peer).toBeLessThan(1_000);
      expect(perS(load)).toBeGreaterThan(8_000);
    });

    it('are as they say, when the next ones do, too', () => {
      const load = usual();
      for (let i = 1; i <= 2; i++) load.loaded({ arena: 100 }, 5, (20 + 10 * i) * 1e6);
      expect(perS(load)).toBeLessThan(500);
    });
  });

  it('of freed blocks run only while the engine computes', () => {
    const load = new EngineLoad(4);
    for (let i = 0; i < 10; i++) {
      load.freed(3);
      load.step(0, 1, 0.5);
    }
    expect(rates(load).freedBlocksPerS).toBeCloseTo(6, 0);
  });

  it('of loads are by tier; one of several tiers is shared among them by what is known', () => {
    const load = new EngineLoad(4);
    load.loaded({ arena: 100 }, 0.01, 0);
    load.loaded({ disk: 10 }, 0.1, 0);
    expect(rates(load).loadBlocksPerS).toEqual({ arena: 10_000, disk: expect.closeTo(100, 6) });
    load.loaded({ arena: 50, disk: 5 }, 0.055, 0);
    const { loadBlocksPerS } = rates(load);
    expect(loadBlocksPerS.arena).toBeCloseTo(10_000, -1);
    expect(loadBlocksPerS.disk).toBeCloseTo(100, 0);
    expect(load.figures(0, 10, 33, 0).loadAheadS).toBeCloseTo((33 * 0.165) / 165, 2);
    load.loaded({}, 5, 0);
    load.loaded({ arena: 1 }, 0, 0);
    for (let i = 0; i < 100; i++) load.loaded({ [`tier${i}`]: 1 }, 1, 0);
    expect(Object.keys(rates(load).loadBlocksPerS)).toHaveLength(16);
  });
});
