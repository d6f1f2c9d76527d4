/** A node that stands still while requests wait for it, and one that has nothing to say; by a clock of the test's own. */

import type { LoadResult } from '@kvtier/scheduler';
import { expect, it, onTestFinished } from 'vitest';
import { SilenceWatch } from './silence.ts';
import { ManualTimers } from './testing/manual-timers.ts';
import { hashOf } from './testing/memory.ts';
import { ConnectorRig, until } from './testing/rig.ts';

const long = { stallMs: 60_000, deadlineMs: 60_000 };
const ids = (first: number, count: number): number[] => Array.from({ length: count }, (_, i) => first + i);

async function attached(): Promise<{ rig: ConnectorRig; clock: ManualTimers; askedTimes: () => number }> {
  const clock = new ManualTimers();
  const rig = new ConnectorRig({ timers: clock });
  onTestFinished(async () => {
    rig.node.go();
    await rig.close();
    expect(rig.executor.mapped.size, 'arenas still mapped').toBe(0);
    expect(rig.node.wrongs).toEqual([]);
  });
  await rig.node.start();
  while (!rig.connector.attached) {
    await clock.pass(20); // between its attempts
    await new Promise((resolve) => setTimeout(resolve, 1));
  }
  return { rig, clock, askedTimes: () => rig.node.log.filter((body) => body === 'stats').length };
}

/** How it ends, once it has. */
function awaited(rig: ConnectorRig, id: string, chain: number, blocks: number[]): { result?: LoadResult } {
  const load: { result?: LoadResult } = {};
  void rig.load(id, chain, 0, blocks, undefined, long).then((result) => {
    load.result = result;
  });
  return load;
}

it('what waits for a node that is stopped ends after 1.2 seconds, and what came until then is used', async () => {
  const { rig, clock } = await attached();
  rig.node.seed(hashOf(1, 0));
  const some = awaited(rig, 'a', 1, ids(50, 4));
  const none = awaited(rig, 'b', 2, ids(60, 4));
  await until(() => rig.node.awaiting.size === 2 && rig.holds(50, 1, 0), 'the loads, and the first block');
  rig.node.stopped = true;
  await clock.pass(1_150);
  expect([some.result, none.result, rig.connector.suspended]).toEqual([undefined, undefined, false]);
  await clock.pass(150);
  await until(() => some.result !== undefined && none.result !== undefined, 'the end of both');
  expect(some.result).toMatchObject({ loaded: 1, reason: 'deadline' });
  expect(none.result).toMatchObject({ loaded: 0, reason: 'deadline' });
  expect(rig.connector.suspended).toBe(true);
  expect(rig.connector.counters).toMatchObject({ suspensions: 1, sessions: 1 });
  // It goes on: both leases are given back, and it is asked again.
  rig.node.go();
  await rig.attached();
  await until(() => rig.node.leases.size === 0, 'the releases');
  expect(await rig.load('c', 1, 0, ids(70, 1))).toMatchObject({ loaded: 1 });
  expect(rig.connector.counters).toMatchObject({ suspensions: 1, sessions: 1 });
});

it('slots that a stopped node gives after all are given back', async () => {
  const { rig, clock } = await attached();
  rig.node.stopped = true;
  const stored = rig.store(1, 0, ids(1, 2));
  const none = awaited(rig, 'b', 2, ids(60, 4));
  await clock.pass(1_300);
  await stored;
  await until(() => none.result !== undefined, 'the end of the load');
  rig.node.go();
  await until(() => rig.node.log.includes('abort'), 'the abort');
  expect(rig.node.reserved.size).toBe(0);
  expect(rig.node.held.size).toBe(0);
});

it('a node that has nothing to say for a minute is asked for a sign of life every half second, and waited for', async () => {
  const { rig, clock, askedTimes } = await attached();
  const load = awaited(rig, 'a', 1, ids(50, 2));
  await until(() => rig.node.awaiting.size === 1, 'the load');
  for (let asked = 1; asked <= 100; asked++) {
    await clock.pass(500);
    await until(() => askedTimes() === 2 * asked - 1, 'the question');
    expect(await rig.connector.stats(), 'what came before it has been read').not.toBe(null);
  }
  expect([load.result, rig.connector.counters.suspensions]).toEqual([undefined, 0]);
  for (let i = 0; i < 2; i++) rig.node.seed(hashOf(1, i));
  await until(() => load.result !== undefined, 'the end');
  expect(load.result).toMatchObject({ loaded: 2, reason: '' });
  await clock.pass(60_000);
  expect(askedTimes(), 'nobody waits: nobody asks').toBe(200);
});

it('time in which this process had no turn is not the silence of its node', async () => {
  const { rig, clock, askedTimes } = await attached();
  const load = awaited(rig, 'a', 1, ids(50, 2));
  await until(() => rig.node.awaiting.size === 1, 'the load');
  rig.node.stopped = true;
  for (let late = 0; late < 11; late++) await clock.oversleep(4_000);
  expect([load.result, rig.connector.suspended]).toEqual([undefined, false]);
  rig.node.go();
  await until(() => askedTimes() === 1, 'the sign');
  rig.node.seed(hashOf(1, 0));
  rig.node.seed(hashOf(1, 1));
  await until(() => load.result !== undefined, 'the end');
  expect(load.result).toMatchObject({ loaded: 2, reason: '' });
});

it.each([
  ['a pulse that beats: it is slow', () => 90, Number.POSITIVE_INFINITY],
  ['no beat', () => undefined, 1_200],
  ['a turn that does not end, and has half of a processor', (nowMs: number) => nowMs / 2, 2_400],
])('%s', async (_, stillMs, silentAtMs) => {
  const clock = new ManualTimers();
  let atMs = Number.POSITIVE_INFINITY;
  const watch = new SilenceWatch(clock, {
    isWaiting: () => atMs === Number.POSITIVE_INFINITY,
    ask: () => {},
    stillMs: () => stillMs(clock.nowMs()),
    onSilent: () => {
      atMs = clock.nowMs();
    },
  });
  watch.begin();
  await clock.pass(60_000);
  expect(atMs).toBe(silentAtMs);
  watch.end();
});
