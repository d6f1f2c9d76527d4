/** A crowd that waits for a worker: a change of workers costs the event loop little, however many wait and however many workers there are. */
import { setImmediate } from 'node:timers/promises';
import type { Worker } from '@kvtier/registry';
import { expect, it, vi } from 'vitest';
import { Expected } from './expected.ts';

const count = 4_096;
/** Nobody serves `m`, and it is expected. */
const someWorkers = Array.from({ length: 200 }, (_, i) => {
  const [state, model] = i % 2 === 0 ? ['silent', 'm'] : ['ready', 'other'];
  const awaySinceMs = state === 'silent' ? performance.now() : undefined;
  return { state, facts: { model }, record: { name: `${i}`, role: 'both' }, awaySinceMs } as Worker;
});

/** So many wait; `asked` says who was asked, in that order. */
function crowd() {
  const workers = vi.fn(() => someWorkers);
  const expected = new Expected({ engines: { workers }, awayMs: 3_600_000 });
  const asked: number[] = [];
  const isOver = { of: (_: number): boolean => false };
  const waits = Array.from({ length: count }, (_, who) => {
    const isOverNow = (): boolean => {
      asked.push(who);
      const facts = { model: 'm' };
      const [nowMs, others] = [performance.now(), { among: undefined, except: new Set(['0']) }];
      const isNobody = expected.untilMs('m') <= nowMs || expected.otherUntilMs('m', others) <= nowMs;
      return expected.isServed({ facts }) || isNobody || isOver.of(who);
    };
    return expected.wait(isOverNow, performance.now() + 600_000, new AbortController().signal);
  });
  return { expected, workers, asked, isOver, waits };
}
const everybody = Array.from({ length: count }, (_, who) => who);

it('is asked a part a turn, and looks at the workers once a turn', async () => {
  const { expected, workers, asked } = crowd();
  expected.changed();
  const turns: number[] = [];
  for (let before = 0; asked.length < count; before = asked.length) {
    await setImmediate();
    turns.push(asked.length - before);
  }
  expect(Math.max(...turns)).toBeLessThanOrEqual(1_024);
  expect(asked).toEqual(everybody);
  expect(workers.mock.calls.length).toBeLessThanOrEqual(3 * turns.length);
  await setImmediate();
  expect(asked).toHaveLength(count);
  expected.close();
});

it('of which some were asked before another change is asked once more, and all who may go on do', async () => {
  const { expected, asked, isOver, waits } = crowd();
  expected.changed();
  await vi.waitUntil(() => asked.length > 0, { timeout: 20_000, interval: 0 });
  expect(asked.length).toBeLessThan(count);
  isOver.of = () => true;
  expected.changed();
  await Promise.all(waits);
  expect(new Set(asked.slice(-count))).toEqual(new Set(everybody));
  expected.close();
});

it('that goes on in vain waits for the next change', async () => {
  const expected = new Expected({ engines: { workers: () => someWorkers }, awayMs: 3_600_000 });
  let asked = 0;
  const isOver = (): boolean => ++asked > 0;
  const waits = Array.from({ length: 200 }, async () => {
    while (!expected.isClosed) await expected.wait(isOver, performance.now() + 600_000, new AbortController().signal);
  });
  for (const changes of [1, 2, 3]) {
    expected.changed();
    for (let turn = 0; turn < 50; turn++) await setImmediate();
    expect(asked).toBe(200 * changes);
  }
  expected.close();
  await Promise.all(waits);
});

it('knows those who are ready again by who they are, what they serve and their role', () => {
  const worker = { state: 'ready', facts: { model: 'm' }, record: { name: 'a', role: 'both' } };
  const workers: object[] = [worker];
  const expected = new Expected({ engines: { workers: () => workers as Worker[] }, awayMs: 3_600_000 });
  const isAnother = (change: () => void): boolean => {
    const before = expected.readyOf('m');
    change();
    return expected.readyOf('m') !== before;
  };
  expect([
    isAnother(() => workers.push({ ...worker, state: 'silent' })),
    isAnother(() => workers.push({ ...worker, facts: { model: 'other' } })),
    isAnother(() => (worker.record = { ...worker.record })),
    isAnother(() => workers.push({ ...worker })),
    isAnother(() => (worker.facts = { model: 'm' })),
    isAnother(() => (worker.record.role = 'prefill')),
    isAnother(() => (worker.state = 'draining')),
    isAnother(() => {}),
  ]).toEqual([false, false, false, true, true, true, true, false]);
  expected.close();
});
