/** Requests for pods that would be answered too late, by what is predicted and by what was learned. */
import { Saturated } from '@kvtier/dispatch';
import { expect, it } from 'vitest';
import { InTime } from './in-time.ts';
import { LatestOfWorkers } from './late.ts';

const wanted = (ttftMs: number | undefined, arrivedMs = 1_000) => ({ model: 'm', arrivedMs, ttftMs });

it('is refused what comes too late, with when to come again; what has waited has less time', () => {
  let count = 0;
  const inTime = new InTime(() => count++);
  inTime.admit(wanted(undefined), 'w', 1e6, 1_000);
  inTime.admit(wanted(2_000), 'w', 2, 1_000);
  const refusal = (predictedS: number, nowMs: number): unknown => {
    try {
      inTime.admit(wanted(2_000), 'w', predictedS, nowMs);
    } catch (error) {
      return error;
    }
    return undefined;
  };
  expect(refusal(1.5, 1_400)).toBeUndefined();
  const refused = refusal(6, 1_500) as Saturated;
  expect(refused).toBeInstanceOf(Saturated);
  expect(refused).toMatchObject({
    ...{ code: 'BUSY', retryAfterS: 5 },
    message:
      'model m: its first token would come 4500 ms after the 2000 ms that it may take (worker w); try again later',
  });
  expect(count).toBe(1);
});

it('where first tokens came later than predicted, less is let in; without news that is forgotten', () => {
  const inTime = new InTime();
  const isIn = (nowMs: number): boolean => {
    try {
      inTime.admit(wanted(1_000, nowMs), 'w', 0.95, nowMs);
    } catch {
      return false;
    }
    return true;
  };
  expect(isIn(0)).toBe(true);
  for (let i = 0; i < 100; i++) inTime.came(0.95, 1.35, { model: wanted(0, 0).model, worker: 'w' }, i);
  expect(isIn(100)).toBe(false);
  expect(isIn(60_000)).toBe(true);
});

it.each([
  ['worker', 'm'],
  ['model', 'another'],
])('one late %s is refused alone: who is in time is let in, and learns', (_, lateModel) => {
  const inTime = new InTime();
  const admitted = { late: 0, good: 0 };
  for (let i = 0; i < 4_000; i++) {
    const isLate = i % 8 === 0;
    const [model, worker, nowMs] = [isLate ? lateModel : 'm', lateModel === 'm' ? `w${i % 8}` : 'w', i * 50];
    try {
      inTime.admit({ model, arrivedMs: nowMs, ttftMs: 1_000 }, worker, 0.6, nowMs);
    } catch {
      continue;
    }
    admitted[isLate ? 'late' : 'good']++;
    inTime.came(0.6, isLate ? 1.4 : 0.55, { model, worker }, nowMs);
  }
  expect(admitted).toEqual({ late: 84, good: 3_500 });
});

it('of more workers than are remembered the one that nobody came from for longest is forgotten', () => {
  const latest = new LatestOfWorkers(0.5);
  const of = (worker: number) => ({ model: 'm', worker: `w${worker}` });
  for (let worker = 0; worker < 2_048; worker++) latest.came(of(worker), 0.1, 0.3, 0);
  latest.came(of(0), 0.1, 0.3, 0);
  for (let worker = 2_048; worker < 2_058; worker++) latest.came(of(worker), 0.1, 0.3, 0);
  const known = [0, 1, 10, 11].map((worker) => latest.s(of(worker), 0.1, 0, 1_000) > 0);
  expect([latest.size, ...known]).toEqual([2_048, true, false, false, true]);
});
