/** Who is passed over for a while, and what that costs it: never its room, nor its turn. */
import { describe, expect, it } from 'vitest';
import type { Match } from './connector.ts';
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

describe('a request whose tier has not answered', () => {
  /** Small ones hold three blocks of 31 from their first step on; `big` needs 19. The tier answers for it in every `period`th pass only. */
  function crowd(period: number): SchedulerRig {
    const rig = new SchedulerRig({
      ...{ blockTokens: 16, blockCount: 32, maxModelTokens: 400 },
      limits: { maxSequences: 8, maxStepTokens: 1_000 },
    });
    // So that room comes back three blocks at a time.
    rig.connector.store = (_hashes, _first, _blocks, onReleased) => queueMicrotask(onReleased);
    let asked = 0;
    rig.connector.match = (id): Match => {
      if (!id.startsWith('big') || ++asked % period === 0) return { state: 'known', blocks: 0 };
      rig.world.later(() => rig.engine.wake());
      return { state: 'pending' };
    };
    return rig;
  }
  const small = (rig: SchedulerRig, id: string, which: number): void =>
    rig.submit(id, prompt(which, 33), { maxTokens: 5 + (which % 8) });
  const begun = (rig: SchedulerRig): string[] =>
    [...rig.outputs.keys()].filter((id) => id.startsWith('young') && rig.tokens(id).length > 0);

  it.each([2, 3, 5])(
    'keeps the room that gathers for it, though it has to ask again: one answer in %d',
    async (period) => {
      const rig = crowd(period);
      for (let i = 0; i < 8; i++) small(rig, `old${i}`, 10 + i);
      await rig.world.until(() => rig.tokens('old0').length === 3);
      rig.submit('big', prompt(1, 302), { maxTokens: 2 });
      for (let i = 0; i < 80; i++) small(rig, `young${i}`, 20 + i);
      await rig.world.until(() => rig.tokens('big').length > 0);
      // No later one began in an earlier step; beside it there is room for one.
      expect(begun(rig).filter((id) => rig.tokens(id).length > rig.tokens('big').length)).toEqual([]);
      expect(begun(rig).length).toBeLessThanOrEqual(1);
      await rig.world.until(() => rig.allEnded());
      expect(rig.tokens('big')).toEqual(naiveAnswer(prompt(1, 302), 2));
      await rig.drain();
      idle(rig);
    },
  );

  it('keeps nobody where there is room for both, nor an executor that has nothing to do', async () => {
    const rig = crowd(Number.POSITIVE_INFINITY);
    rig.submit('big', prompt(1, 302), { maxTokens: 2 });
    for (let i = 0; i < 6; i++) small(rig, `young${i}`, 20 + i);
    await rig.world.until(() => begun(rig).length > 0);
    // Three blocks each, beside the 19.
    expect(begun(rig)).toEqual(['young0', 'young1', 'young2', 'young3']);
    await rig.world.until(() => begun(rig).length === 6);
    expect(rig.outputs.get('big')).toEqual([]);
  });
});
