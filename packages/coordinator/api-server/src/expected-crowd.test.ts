/** A crowd that waits for a worker: a change of workers costs the event loop little, however many wait and however many workers there are. */
import { setImmediate } from 'node:timers/promises';
import type { Worker } from '@kvtier/registry';
import { expect, it, vi } from 'vitest';
import { Expected } from './expected.ts';

const count = 4_096;
/** Nobody serves `m`, and it is expected. */
const someWorkers = Array.from({ length: 200 }, (_, i) => {
  const [state, model] = i % 2 === 0 ? ['silent', 'm'] : ['ready', 'other'];
  return { state, facts: { model }, awaySinceMs: state === 'silent' ? performance.now() : undefined } as Worker;
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
      return expected.isServed({ facts }) || expected.untilMs('m') <= performance.now() || isOver.of(who);
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
  expect(workers.mock.calls.length).toBeLessThanOrEqual(2 * turns.length);
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
