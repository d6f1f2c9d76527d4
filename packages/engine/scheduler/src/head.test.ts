/** A hit that comes from both ends: whichever end is there first, comes short, fails or goes on, the answer is right and all is let go. */
import { describe, expect, it } from 'vitest';
import type { Faults } from './testing/faulty-connector.ts';
import { naiveAnswer, prompt, SchedulerRig } from './testing/rig.ts';
import type { EngineLimits } from './types.ts';

const long = prompt(1, 43);
const answer = naiveAnswer(long, 4);

/** The tier holds ten blocks of four tokens; of a hit the first three are computed. */
async function warmed(faults: Faults = {}, limits: Partial<EngineLimits> = {}): Promise<SchedulerRig> {
  const rig = new SchedulerRig({ faults: { head: () => 3, ...faults }, limits: { maxStepTokens: 8, ...limits } });
  await rig.generate('warm', long);
  await rig.drain();
  rig.engine.resetPrefixCache();
  rig.executor.steps.length = 0;
  rig.connector.prefills.length = 0;
  return rig;
}

const computed = (rig: SchedulerRig): number[][] =>
  rig.executor.steps.map((step) => [step.computedTokens[0]!, step.tokenIds.length]);

async function atRest(rig: SchedulerRig, stats: object): Promise<void> {
  await rig.drain();
  expect(rig.engine.stats()).toMatchObject({ loading: 0, freeBlocks: 31, ...stats });
  rig.engine.checkIntegrity();
}

describe('a head and a load', () => {
  it('take part side by side: the prompt is passed over from where both end', async () => {
    const rig = await warmed();
    expect(await rig.generate('a', long)).toEqual(answer);
    const decodes = [43, 44, 45].map((at) => [at, 1]);
    expect(computed(rig)).toEqual([[0, 8], [8, 4], [40, 3], ...decodes]);
    expect(rig.outputs.get('a')![0]!.cache).toMatchObject({ cachedTokens: 28, tokensByTier: { arena: 28 } });
    await atRest(rig, { headLoads: 1, loads: 1, shortLoads: 0, loadedTokens: 28, promptTokens: 86 });
    // All of it is found here now.
    await rig.generate('b', long);
    expect(rig.outputs.get('b')![0]!.cache!.tokensByTier).toEqual({ engine: 40 });
  });

  it('wait for whichever is later, and what is ahead is told without what is loaded', async () => {
    let isLate = true;
    const rig = await warmed({ lateLoad: () => isLate });
    rig.submit('a', long);
    await rig.world.until(() => rig.executor.steps.length === 2);
    await rig.world.until(() => rig.world.pendingCount === 0);
    expect(rig.engine.load().tokensAhead).toBe(3); // the load is late, the head is done
    isLate = false;
    for (const arrive of rig.connector.late.splice(0)) arrive();
    expect(rig.engine.stats().cachedBlocks).toBe(10); // others find it before its next step
    await rig.world.until(() => rig.allEnded());
    expect(rig.tokens('a')).toEqual(answer);
    expect(computed(rig).slice(0, 3)).toEqual([
      [0, 8],
      [8, 4],
      [40, 3],
    ]);
    await atRest(rig, { headLoads: 1, expiredLoads: 0 });
  });

  it('leave as many tokens ahead whichever ends first, and offer the tier what it may lack', async () => {
    const rig = await warmed();
    const { exportedBlocks } = rig.engine.stats();
    rig.submit('a', long);
    const ahead: number[] = [];
    while (!rig.allEnded()) {
      await rig.world.advance();
      ahead.push(rig.engine.load().tokensAhead);
    }
    expect([...new Set(ahead)].filter((tokens) => tokens > 3)).toEqual([15, 7]);
    expect(rig.engine.stats().exportedBlocks - exportedBlocks).toBe(4); // the head, and the one that the answer fills
    await atRest(rig, { headLoads: 1 });
  });

  it.each([0, 1, 6])('of which %i of seven blocks come: computed from there', async (good) => {
    let shorten = 10;
    const rig = await warmed({ shorten: () => shorten });
    shorten = good;
    expect(await rig.generate('a', long)).toEqual(answer);
    expect(computed(rig)[2]![0]).toBe(12 + 4 * good);
    expect(rig.outputs.get('a')![0]!.cache!.cachedTokens).toBe(4 * good);
    await atRest(rig, { headLoads: 1, shortLoads: 1, loadedTokens: 4 * good });
  });

  it.each([1, 2, 3])(
    'whose load never comes: it is left behind with %i steps begun, and the rest is computed',
    async (steps) => {
      const rig = await warmed({ lateLoad: () => true });
      rig.submit('a', long);
      if (steps < 3) await rig.world.until(() => rig.executor.steps.length === steps);
      else await rig.world.until(() => rig.executor.steps.length === 2 && rig.world.pendingCount === 0);
      rig.world.fireNextTimer();
      await rig.world.until(() => rig.allEnded());
      expect(rig.tokens('a')).toEqual(answer);
      // What steps had computed is found again; there is no second load.
      expect(computed(rig)[steps < 3 ? steps : 2]).toEqual(steps === 1 ? [8, 8] : [12, 8]);
      expect(rig.engine.stats()).toMatchObject({ expiredLoads: 1, shortLoads: 1, loading: 1 });
      await atRest(rig, { headLoads: 1, loads: 1 });
    },
  );

  it('end with the request, at any time', async () => {
    for (let events = 0; events < 14; events++) {
      for (const isLate of [false, true]) {
        const rig = await warmed({ lateLoad: () => isLate });
        rig.submit('a', long);
        for (let n = 0; n < events && rig.world.pendingCount > 0; n++) await rig.world.advance();
        rig.engine.abort('a');
        await rig.world.until(() => rig.allEnded());
        await atRest(rig, {});
        expect(await rig.generate('b', prompt(2, 30))).toEqual(naiveAnswer(prompt(2, 30), 4));
        expect(rig.defects).toEqual([]);
      }
    }
  });

  it('end with a step that fails', async () => {
    let fails = false;
    const rig = new SchedulerRig({
      faults: { head: () => 3 },
      stepFailure: () => (fails ? new Error('a fault') : undefined),
    });
    await rig.generate('warm', long);
    await rig.drain();
    rig.engine.resetPrefixCache();
    fails = true;
    rig.submit('a', long);
    await rig.world.until(() => rig.allEnded());
    expect(rig.last('a').error!.message).toBe('a fault');
    fails = false;
    await atRest(rig, { headLoads: 1 });
    expect(await rig.generate('b', long)).toEqual(answer);
  });

  it('are for a request that keeps nobody waiting', async () => {
    const rig = await warmed();
    rig.submit('a', long);
    rig.submit('b', prompt(2, 20));
    await rig.world.until(() => rig.allEnded());
    expect([rig.tokens('a'), rig.tokens('b')]).toEqual([answer, naiveAnswer(prompt(2, 20), 4)]);
    await atRest(rig, { headLoads: 0, loads: 1 });
  });

  it('keep nobody out: who comes meanwhile is in the next step', async () => {
    const rig = await warmed();
    rig.submit('a', long);
    await rig.world.until(() => rig.executor.steps.length === 1);
    rig.submit('b', prompt(2, 3));
    await rig.world.until(() => rig.allEnded());
    expect([rig.tokens('a'), rig.tokens('b')]).toEqual([answer, naiveAnswer(prompt(2, 3), 4)]);
    expect(rig.executor.steps[1]!.queryTokens).toHaveLength(2);
    await atRest(rig, { headLoads: 1, preemptions: 0 });
  });
});
