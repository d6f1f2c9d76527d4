/** Who was passed over because as many as may wait for other workers, and has had its room since: it is not passed over any more. */
import { describe, expect, it } from 'vitest';
import { idle } from './testing/pair.ts';
import { naiveAnswer, prompt, SchedulerRig } from './testing/rig.ts';

const others = Array.from({ length: 300 }, (_, i) => `other${i}`);

/** The hand-off 'x' waits, with its room, as one of two that may; others wait for that, and younger requests for a place in a step. */
async function handedOver(deadlineMs: number): Promise<SchedulerRig> {
  const rig = new SchedulerRig({ blockCount: 400, limits: { maxSequences: 2, maxWaiting: 1_000 } });
  const { world, engine } = rig;
  const handOff = (id: string, which: number, part: { deadlineMs?: number } = {}): void =>
    rig.submit(id, prompt(which, 40), { handOff: { blocks: 9, stallMs: 600_000, deadlineMs: 600_000, ...part } });
  handOff('first', 1);
  handOff('second', 2);
  await world.until(() => engine.stats().awaiting === 2 && world.pendingCount === 0);
  handOff('x', 3, { deadlineMs });
  for (const id of others) handOff(id, 4);
  for (let i = 0; i < 200; i++) rig.submit(`young${i}`, prompt(7 + i, 9 + (i % 3)), { maxTokens: 8 });
  await world.until(() => rig.ended('young0'));
  expect(rig.outputs.get('x')).toEqual([]);
  engine.abort('first');
  await world.until(() => rig.outputs.get('x')!.length === 1);
  return rig;
}

/** Before any younger one that has not begun yet. */
async function isNext(rig: SchedulerRig): Promise<void> {
  const begun = (): number =>
    [...rig.outputs.keys()].filter((id) => id.startsWith('young') && rig.tokens(id).length > 0).length;
  const before = begun();
  await rig.world.until(() => rig.tokens('x').length > 0);
  expect(begun() - before).toBe(0);
  for (const id of ['second', ...others]) rig.engine.abort(id);
  await rig.world.until(() => rig.allEnded());
  expect(rig.tokens('x')).toEqual(naiveAnswer(prompt(3, 40), 4));
}

describe('a hand-off that waited for its turn to wait', () => {
  it('is computed at its place when it is called off, with its room', async () => {
    const rig = await handedOver(600_000);
    rig.engine.changeHandOff('x', 0);
    await isNext(rig);
    await rig.drain();
    idle(rig);
  });

  it('is computed at its place when the connector lets it down, without it', async () => {
    const rig = await handedOver(1);
    rig.connector.awaiting.delete([...rig.connector.awaiting.keys()].find((id) => id.startsWith('x'))!);
    while (rig.engine.stats().expiredLoads === 0) rig.world.fireNextTimer();
    await isNext(rig);
  });
});
