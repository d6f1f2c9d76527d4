/** The two ends of a hand-off: two engines in one simulated world, over one tier. */
import { expect } from 'vitest';
import type { SharedTier } from './faulty-connector.ts';
import { type RigOptions, SchedulerRig } from './rig.ts';
import { EngineWorld } from './world.ts';

export const patience = { stallMs: 50, deadlineMs: 1_000 };
export const tierOf = (): SharedTier => ({ blocks: new Map(), listeners: new Set() });

/** Blocks of 4 tokens, 16 tokens a step. */
export function pair(
  forP: RigOptions = {},
  forD: RigOptions = {},
): { world: EngineWorld; p: SchedulerRig; d: SchedulerRig } {
  const world = new EngineWorld(forD.seed ?? 1);
  const tier = tierOf();
  return { world, p: new SchedulerRig({ world, tier, ...forP }), d: new SchedulerRig({ world, tier, ...forD }) };
}

/** Nothing of any request is left. */
export const idle = (rig: SchedulerRig): void => {
  rig.engine.checkIntegrity();
  expect(rig.defects).toEqual([]);
  expect(rig.engine.stats()).toMatchObject({ waiting: 0, running: 0, loading: 0, awaiting: 0, exportBlocks: 0 });
  expect(rig.engine.load()).toMatchObject({ waiting: 0, running: 0, tokensAhead: 0, usedBlocks: 0, waitingBlocks: 0 });
};
