/** A long queue behind loads: how much of it a pass looks up, and that everybody gets a turn. */
import { setImmediate } from 'node:timers/promises';
import { describe, expect, it } from 'vitest';
import { naiveAnswer, prompt, SchedulerRig } from './testing/rig.ts';

/** Two loads that do not end, of the same prompt as `waiting` requests in the queue. */
async function behindLoads(
  waiting: number,
  blockCount = 64,
): Promise<{ rig: SchedulerRig; looksOf: () => Promise<number> }> {
  let late = false;
  const limits = { maxSequences: 2, maxWaiting: 1_000, loadDeadlineMs: 600_000 };
  const rig = new SchedulerRig({ blockCount, limits, faults: { lateLoad: () => late } });
  for (const which of [1, 2]) await rig.generate(`warm ${which}`, prompt(which, 20));
  await rig.drain();
  rig.engine.resetPrefixCache();
  late = true;
  let looks = 0;
  const match = rig.connector.match.bind(rig.connector);
  rig.connector.match = (...question) => {
    looks++;
    return match(...question);
  };
  for (let i = 0; i < 2 + waiting; i++) rig.submit(`r${i}`, prompt(1, 22));
  await rig.world.until(() => rig.connector.late.length === 2);
  const looksOf = async (): Promise<number> => {
    looks = 0;
    rig.engine.wake();
    await setImmediate();
    return looks;
  };
  return { rig, looksOf };
}

describe('a long queue behind as many loads as may be', () => {
  it('is looked up in parts, and not in every step anew', async () => {
    const { rig, looksOf } = await behindLoads(300);
    let most = 0;
    while (rig.world.pendingCount > 0 || rig.world.timerCount > 2) {
      most = Math.max(most, await looksOf());
      await rig.world.advance();
    }
    expect(most).toBeLessThanOrEqual(32 + 16);
    // All are known to wait.
    expect(await looksOf()).toBe(16);
    expect(rig.engine.stats()).toMatchObject({ waiting: 300, loading: 2 });
    await rig.world.until(() => {
      for (const arrive of rig.connector.late.splice(0)) rig.world.later(arrive);
      return rig.allEnded();
    }, 60_000);
    for (const id of rig.outputs.keys())
      if (id.startsWith('r')) expect(rig.tokens(id)).toEqual(naiveAnswer(prompt(1, 22), 4));
  });

  it('keeps nobody for whom there is nothing to wait for', async () => {
    const { rig } = await behindLoads(200);
    rig.submit('fresh', prompt(7, 20));
    await rig.world.until(() => rig.ended('fresh'));
    expect(rig.engine.stats()).toMatchObject({ waiting: 200, loading: 2 });
  });

  it('keeps nobody either where the tier answers at once, and so nothing more happens', async () => {
    const { rig } = await behindLoads(0);
    rig.connector.match = (id, _hashes, local) => ({ state: 'known', blocks: id.startsWith('r') ? 5 - local : 0 });
    for (let i = 0; i < 200; i++) rig.submit(`r0${i}`, prompt(1, 22));
    rig.submit('fresh', prompt(7, 20));
    await rig.world.until(() => rig.ended('fresh'));
    expect(rig.engine.stats()).toMatchObject({ waiting: 200, loading: 2, expiredLoads: 0 });
  });

  it('is looked at again in turn: what one of it wants to load, somebody else may have computed', async () => {
    const { rig } = await behindLoads(100);
    rig.submit('wants', prompt(2, 22));
    await rig.world.until(() => rig.world.pendingCount === 0 && rig.world.timerCount === 2);
    expect(rig.engine.stats()).toMatchObject({ waiting: 101, loading: 2 });
    rig.connector.tier.clear();
    rig.submit('computes', prompt(2, 20), { maxTokens: 40 });
    await rig.world.until(() => rig.ended('wants'));
    expect(rig.engine.stats()).toMatchObject({ waiting: 100, loading: 2, loads: 2 });
    expect(rig.tokens('wants')).toEqual(naiveAnswer(prompt(2, 22), 4));
  });

  it.each([
    ['first', 0],
    ['last', 60],
  ])('gets its turns also while others take every place in a step: the %s of it', async (_, before) => {
    const { rig } = await behindLoads(before, 400);
    const { world, engine } = rig;
    const settled = (): boolean => world.pendingCount === 0 && world.timerCount === 2;
    rig.submit('wants', prompt(2, 22));
    for (let i = before; i < 60; i++) rig.submit(`r${2 + i}`, prompt(1, 22));
    await world.until(settled);
    expect(engine.stats()).toMatchObject({ waiting: 61, loading: 2, running: 0 });
    rig.connector.tier.clear();
    rig.submit('computes', prompt(2, 20), { maxTokens: 8 });
    for (let i = 0; i < 200; i++) rig.submit(`busy${i}`, prompt(7 + (i % 40), 9 + (i % 3)), { maxTokens: 8 });
    await world.until(() => rig.ended('computes'));
    // What it wanted to load is cached; to look at all of them takes four passes that find a place.
    await world.until(() => rig.ended('wants'));
    expect([...rig.outputs.keys()].filter((id) => id.startsWith('busy') && rig.ended(id)).length).toBeLessThan(30);
    expect(engine.stats()).toMatchObject({ loading: 2, loads: 2 });
    expect(rig.tokens('wants')).toEqual(naiveAnswer(prompt(2, 22), 4));
  });
});

describe('loads of requests that are gone', () => {
  it('are ended, and make place for others', async () => {
    const { rig } = await behindLoads(0);
    const { connector, engine, world } = rig;
    const ended: string[] = [];
    connector.endLoad = (id, blocks) => {
      ended.push(`${id.slice(0, 2)} ${blocks}`);
      world.later(connector.late.shift()!);
    };
    rig.submit('next', prompt(2, 22));
    await world.until(() => world.pendingCount === 0);
    expect([engine.stats().loading, rig.tokens('next')]).toEqual([2, []]);
    for (const id of ['r0', 'r1']) engine.abort(id);
    await world.until(() => engine.stats().loading === 1 && connector.late.length === 1); // its own
    world.later(connector.late.shift()!);
    await world.until(() => rig.ended('next'));
    expect(ended).toEqual(['r0 0', 'r1 0']);
    expect(rig.tokens('next')).toEqual(naiveAnswer(prompt(2, 22), 4));
    expect(engine.stats()).toMatchObject({ loading: 0, loads: 3, expiredLoads: 0 });
  });
});
