/** Hand-offs of prompts that lie here already: they wait for a place in a step as any other, and no pass looks all of them up. */
import { KvCacheManager } from '@kvtier/prefix-cache';
import { afterEach, describe, expect, it, vi } from 'vitest';
import { naiveAnswer, prompt, SchedulerRig } from './testing/rig.ts';

const handOff = { blocks: 9, stallMs: 500_000, deadlineMs: 500_000 };
afterEach(() => void vi.restoreAllMocks());

/** Two requests run, and these wait, of a prompt that is cached here. */
async function behindTwo(
  waiting: number,
  blockCount = 600,
  others = 0,
): Promise<{ rig: SchedulerRig; looks: () => number }> {
  const rig = new SchedulerRig({ blockCount, evictionPolicy: 'lru', limits: { maxSequences: 2, maxWaiting: 1_000 } });
  await rig.generate('warm', prompt(1, 40));
  // All that is free now is taken later than what the prompt has.
  for (let i = 0; i < others; i++) await rig.generate(`later${i}`, prompt(10 + i, 40));
  for (const which of [2, 3]) rig.submit(`runs${which}`, prompt(which, 8), { maxTokens: 120 });
  await rig.world.until(() => rig.engine.stats().running === 2);
  const look = vi.spyOn(KvCacheManager.prototype, 'getComputedBlocks');
  const looks = (): number => look.mock.calls.splice(0).length;
  for (let i = 0; i < waiting; i++) rig.submit(`h${i}`, prompt(1, 40), { handOff });
  return { rig, looks };
}

describe('many hand-offs of what lies here', () => {
  it('are looked up once each when they come, and a few in a pass', async () => {
    const waiting = 300;
    const { rig, looks } = await behindTwo(waiting);
    expect(looks()).toBeLessThanOrEqual(waiting + 2);
    let most = 0;
    for (let steps = rig.executor.steps.length; rig.executor.steps.length < steps + 60; ) {
      const { length } = rig.executor.steps;
      await rig.world.advance();
      const done = looks();
      if (rig.executor.steps.length > length) most = Math.max(most, done);
    }
    expect(most).toBeGreaterThan(0);
    expect(most).toBeLessThanOrEqual(16 + 2);
    await rig.world.until(() => rig.allEnded());
    expect(rig.tokens('h299')).toEqual(naiveAnswer(prompt(1, 40), 4));
    expect(rig.engine.stats()).toMatchObject({ handOffs: waiting, handOffEnds: { local: waiting } });
  });

  it('leave the queue when it lies here no more', async () => {
    const { rig } = await behindTwo(300, 120, 9);
    const told = (): number =>
      [...rig.outputs].filter(([id, outputs]) => id.startsWith('h') && outputs.length > 0).length;
    expect(told()).toBe(0);
    // What runs takes its blocks.
    await rig.world.until(() => told() === 2);
    expect(rig.engine.stats()).toMatchObject({ running: 2, awaiting: 2 });
    for (const id of rig.outputs.keys()) rig.engine.abort(id);
    await rig.world.until(() => rig.allEnded());
  });

  it('leave at once, one whose hand-off is of more blocks than before', async () => {
    const { rig } = await behindTwo(20);
    rig.submit('x', [...prompt(1, 40), ...prompt(5, 40)], { handOff });
    for (let i = 0; i < 4; i++) await rig.world.advance();
    expect(rig.outputs.get('x')).toEqual([]);
    rig.engine.changeHandOff('x', 15);
    await rig.world.until(() => rig.engine.stats().awaiting > 0);
    expect(rig.outputs.get('x')!.length).toBe(1);
    expect(rig.engine.stats()).toMatchObject({ running: 2, awaiting: 1, waiting: 20 });
    for (const id of rig.outputs.keys()) rig.engine.abort(id);
    await rig.world.until(() => rig.allEnded());
  });
});
