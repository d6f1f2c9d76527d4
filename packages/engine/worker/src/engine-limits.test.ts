/** How long the engine waits for a load that its connector may still bring. */
import { engineWorkerSchema } from '@kvtier/config';
import { prompt, SchedulerRig } from '@kvtier/scheduler/testing';
import { expect, it } from 'vitest';
import { engineLimits } from './engine-limits.ts';

it.each([
  [5_000, 30],
  [60_000, 62],
])('with loadDeadlineMs %i a load has %i s to end', async (loadDeadlineMs, seconds) => {
  const config = engineWorkerSchema.parse({
    ...{ modelDir: '/m', servedName: 'm', listen: 'unix:/e', cacheNodeSocket: '/n', maxSequences: 4 },
    loadDeadlineMs,
  });
  let late = false;
  const rig = new SchedulerRig({ limits: engineLimits(config, 16), faults: { lateLoad: () => late } });
  await rig.generate('before', prompt(1, 40));
  await rig.drain();
  rig.engine.resetPrefixCache();
  late = true;
  const beganUs = rig.world.clock.nowUs();
  await rig.generate('a', prompt(1, 40));
  expect(rig.engine.stats().expiredLoads).toBe(1);
  expect((rig.world.clock.nowUs() - beganUs) / 1e6).toBeCloseTo(seconds, 1);
});
