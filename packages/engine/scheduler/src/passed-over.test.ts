/** Who is passed over for a while, and what that costs it: never its room, nor its turn. */

import { KvCacheManager } from '@kvtier/prefix-cache';
import { describe, expect, it, vi } from 'vitest';
import type { Match } from './connector.ts';
import { idle } from './testing/pair.ts';
import { naiveAnswer, prompt, SchedulerRig } from './testing/rig.ts';
import { EngineWorld } from './testing/world.ts';

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

  it('keeps no more room than it lacks: blocks that somebody uses are there', async () => {
    const rig = new SchedulerRig({ blockCount: 64, maxModelTokens: 400, limits: { maxStepTokens: 200 } });
    rig.connector.match = (id): Match => (id.startsWith('big') ? { state: 'pending' } : { state: 'known', blocks: 0 });
    const shared = prompt(1, 160);
    rig.submit('old', shared, { maxTokens: 40 }); // 40 of 63 blocks
    await rig.world.until(() => rig.tokens('old').length === 1);
    rig.submit('big', [...shared, ...prompt(2, 20)]); // and 5 of its own
    rig.submit('young', prompt(3, 40), { maxTokens: 1 });
    rig.submit('next', prompt(4, 36), { maxTokens: 1 }); // 9, where 8 are left
    await rig.world.until(() => rig.ended('young'));
    expect([rig.tokens('big'), rig.tokens('next')]).toEqual([[], []]);
    expect(rig.tokens('old').length).toBe(3);
  });

  it('has its hit gone through for that, and who ends a pass in a full pool has not', async () => {
    const looks = vi.spyOn(KvCacheManager.prototype, 'heldBlocks');
    const rig = new SchedulerRig(); // 31 blocks
    let match: Match = { state: 'known', blocks: 0 };
    rig.connector.match = () => match;
    rig.submit('old', prompt(1, 60), { maxTokens: 40 });
    await rig.world.until(() => rig.tokens('old').length === 1);
    rig.submit('full', [...prompt(1, 40), ...prompt(2, 80)]);
    await rig.world.until(() => rig.tokens('old').length === 20);
    expect([rig.tokens('full'), looks.mock.calls.length]).toEqual([[], 0]);
    match = { state: 'pending' };
    await rig.world.until(() => rig.tokens('old').length === 23);
    expect(looks.mock.results.map(({ value }) => value)).toEqual([10, 10, 10]);
    looks.mockRestore();
  });

  it('keeps nobody while all that runs is a hit whose rest is loaded', async () => {
    const rig = new SchedulerRig({ faults: { head: () => 3, lateLoad: () => true } });
    await rig.generate('warm', prompt(1, 43));
    await rig.drain();
    rig.engine.resetPrefixCache();
    const match = rig.connector.match.bind(rig.connector);
    rig.connector.match = (id, ...asked) => (id.startsWith('big') ? { state: 'pending' } : match(id, ...asked));
    rig.submit('head', prompt(1, 43)); // 11 of 31 blocks
    await rig.world.until(() => rig.connector.late.length === 1 && rig.world.pendingCount === 0);
    expect(rig.engine.stats()).toMatchObject({ running: 1, headLoads: 1 });
    rig.submit('big', prompt(2, 72)); // 18 of the 20 that are left
    rig.submit('young', prompt(3, 12), { maxTokens: 1 });
    await rig.world.until(() => rig.ended('young'));
    expect([rig.tokens('big'), rig.tokens('head')]).toEqual([[], []]);
  });

  it('keeps nobody who has loaded from the room of those who are computed already, and are stored', async () => {
    const rig = new SchedulerRig({ limits: { exportShare: 1 } }); // 31 blocks
    await rig.generate('warm', prompt(2, 16));
    await rig.drain();
    rig.engine.resetPrefixCache();
    const [match, store] = [rig.connector.match.bind(rig.connector), rig.connector.store.bind(rig.connector)];
    rig.connector.match = (id, ...asked) => (id.startsWith('asks') ? { state: 'pending' } : match(id, ...asked));
    let stores = 0;
    rig.connector.store = (hashes, first, blocks, onReleased, options) => {
      if (stores++ > 2) store(hashes, first, blocks, onReleased, options);
      else queueMicrotask(onReleased); // and no answer
    };
    rig.submit('stored', prompt(1, 48), { prefillOnly: { blocks: 12 } });
    await rig.world.until(() => stores === 3 && rig.world.pendingCount === 0);
    rig.submit('old', prompt(3, 5), { maxTokens: 60 });
    await rig.world.until(() => rig.tokens('old').length === 2);
    const load = rig.connector.load.bind(rig.connector);
    let arrive = (): void => {};
    rig.connector.load = (...load4) => {
      arrive = () => load(...load4);
    };
    rig.submit('asks', prompt(4, 4), { maxTokens: 1 });
    rig.submit('loads', [...prompt(2, 16), ...prompt(5, 40)], { maxTokens: 1 }); // 4 of 14 blocks come
    await rig.world.until(() => rig.engine.stats().loading === 1);
    await rig.world.until(() => rig.engine.stats().freeBlocks < 10);
    const before = rig.tokens('old').length;
    arrive();
    await rig.world.until(() => rig.ended('loads'));
    expect(rig.tokens('old').length - before).toBe(6);
    expect(rig.ended('old')).toBe(false);
    await rig.world.until(() => rig.ended('old'));
  });
});

describe('a request that waits for its turn', () => {
  /** As the node's connector: asked anew, at its turn or before it, when its answer is five seconds old; that one answers meanwhile. */
  function remembering(rig: SchedulerRig, secondsNow: () => number) {
    const known = new Map<string, { at: number; isAsked: boolean }>();
    /** How old answers were, of those that were used last. */
    const ages = new Map<string, number>();
    const ask = (id: string): void => {
      const before = known.get(id);
      if (before?.isAsked || (before && secondsNow() - before.at <= 5)) return;
      if (before) before.isAsked = true;
      // Long before the step is over.
      queueMicrotask(() => {
        known.set(id, { at: secondsNow(), isAsked: false });
        rig.engine.wake();
      });
    };
    rig.connector.match = (id): Match => {
      ask(id);
      const answer = known.get(id);
      if (!answer) return { state: 'pending' };
      ages.set(id.split('#')[0]!, secondsNow() - answer.at);
      return { state: 'known', blocks: 0 };
    };
    const asked: string[] = [];
    rig.connector.renew = (id) => {
      if (!known.has(id)) return;
      asked.push(id.split('#')[0]!);
      ask(id);
    };
    return { ages, asked };
  }

  /** Each step takes so many seconds. */
  function inSteps(seconds: number, maxSequences: number) {
    const one = { steps: 0 };
    const world = new EngineWorld(1);
    const { clock } = world;
    const nowUs = (): number => clock.nowUs() + one.steps * seconds * 1e6;
    const rig = new SchedulerRig({
      world: Object.assign(world, { clock: { ...clock, nowUs } }),
      ...{ blockCount: 400, limits: { maxSequences, maxStepTokens: 200 } },
      stepFailure: () => {
        one.steps++;
        return undefined;
      },
    });
    return { rig, one, ...remembering(rig, () => nowUs() / 1e6) };
  }

  it.each([1, 11])(
    'has an answer of just before it, though steps take %i s, and loses it to nobody',
    async (seconds) => {
      const { rig, ages } = inSteps(seconds, 2);
      for (const which of [1, 2]) rig.submit(`old${which}`, prompt(which, 8), { maxTokens: 40 + 20 * which });
      await rig.world.until(() => rig.tokens('old1').length === 1);
      rig.submit('next', prompt(3, 8));
      rig.submit('behind', prompt(5, 8));
      await rig.world.until(() => rig.tokens('old1').length === 58);
      rig.submit('young', prompt(4, 8));
      await rig.world.until(() => rig.ended('old1'));
      const before = rig.tokens('old2').length;
      await rig.world.until(() => rig.tokens('next').length > 0);
      expect(rig.tokens('old2').length - before).toBe(1); // in the first place that was free
      await rig.world.until(() => rig.allEnded());
      expect(ages.get('next')).toBeLessThanOrEqual(Math.max(6, seconds) + 0.1);
      expect(ages.get('behind')).toBeLessThanOrEqual(Math.max(6, seconds) + 0.1);
    },
  );

  it('is asked for anew when the step runs already: the executor stands still for nobody', async () => {
    const rig = new SchedulerRig({ limits: { maxSequences: 1 } });
    const order: string[] = [];
    const execute = rig.executor.execute.bind(rig.executor);
    rig.executor.execute = (step) => {
      order.push('step');
      return execute(step);
    };
    rig.connector.renew = () => order.push('asked');
    rig.submit('a', prompt(1, 8));
    await rig.world.until(() => rig.tokens('a').length === 1);
    order.length = 0;
    rig.submit('next', prompt(2, 8), { maxTokens: 1 });
    await rig.world.until(() => rig.allEnded());
    expect(order).toEqual(['step', 'asked', 'step', 'asked', 'step']);
  });

  it('begins in the step in which all places come free, with all the others, however many', async () => {
    const { rig, ages } = inSteps(1, 16);
    for (let i = 0; i < 16; i++) rig.submit(`old${i}`, prompt(i, 8), { maxTokens: 40 });
    await rig.world.until(() => rig.tokens('old15').length === 1);
    for (let i = 0; i < 16; i++) rig.submit(`next${i}`, prompt(20 + i, 8), { maxTokens: 40 });
    await rig.world.until(() => rig.tokens('old0').length === 38);
    rig.submit('young', prompt(4, 8));
    await rig.world.until(() => rig.tokens('young').length > 0);
    const nexts = Array.from({ length: 16 }, (_, i) => `next${i}`);
    expect(nexts.map((id) => rig.tokens(id).length)).toEqual(nexts.map(() => 40));
    expect(Math.max(...nexts.map((id) => ages.get(id)!))).toBeLessThanOrEqual(8);
  });

  it('is asked for with eight others in each pass at most, in turn, of those who may begin in one', async () => {
    const { rig, asked } = inSteps(1, 20);
    for (let i = 0; i < 20; i++) rig.submit(`old${i}`, prompt(i, 4), { maxTokens: 30 });
    await rig.world.until(() => rig.tokens('old19').length === 1);
    for (let i = 0; i < 40; i++) rig.submit(`next${i}`, prompt(i, 8));
    await rig.world.until(() => rig.tokens('old19').length === 10);
    const passes: string[][] = [];
    for (let pass = 0; pass < 4; pass++) {
      asked.length = 0;
      const count = rig.tokens('old19').length;
      await rig.world.until(() => rig.tokens('old19').length > count);
      passes.push([...asked]);
    }
    expect(passes.map(({ length }) => length).sort()).toEqual([4, 8, 8, 8]);
    const all = passes.flat();
    const first20 = Array.from({ length: 20 }, (_, i) => `next${i}`);
    expect(first20.filter((id) => all.includes(id))).toEqual(first20);
    expect(all.filter((id) => !first20.includes(id))).toEqual([]);
  });
});
